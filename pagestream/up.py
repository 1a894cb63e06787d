"""`pagestream up` and `down`: checks, then the stack.

Owns what is looked at before anything starts, so that a person who mistypes learns it at once.
"""

from __future__ import annotations

import asyncio
import os

from pagestream import embedded, instance
from pagestream.plan import Service, python_module, redis_service, services, settings_environment
from pagestream.probe import check_port
from pagestream.progress import open_screen
from pagestream.stack import Stack
from wire import model_store
from wire.config import Settings


def up(settings: Settings, workers: int, gateways: int, make_pid: int | None = None) -> int:
    """Run the stack in the foreground until it is told to stop. Returns the exit code.

    Raises:
        SettingsError: a setting cannot work, the port is taken, or the data folder is in use.
        NoServerError: no Redis server is installed.

    """
    data_dir = settings.data_dir.absolute()
    settings = _with(settings, data_dir=data_dir)
    with instance.claim(data_dir):
        check_port(settings.host, settings.port)
        redis = None
        if "redis_url" not in settings.model_fields_set:
            server = embedded.find_server()
            redis = redis_service(embedded.command(server, data_dir))
            settings = _with(settings, redis_url=embedded.address(data_dir))
        planned = services(settings, workers, gateways, os.environ)
        model = _missing_model(settings)

        async def run() -> int:
            return await Stack(settings, open_screen()).run(model, redis, planned, make_pid)

        return asyncio.run(run())


def _with(settings: Settings, **changes: object) -> Settings:
    """Copy the settings; what is changed counts as given, so that the services get it."""
    return settings.model_copy(update=changes)


def _missing_model(settings: Settings) -> Service | None:
    """Describe how the model is made ready; None if it is."""
    try:
        model_store.resolve(settings)
    except model_store.ModelMissing:
        environ = {**os.environ, **settings_environment(settings)}
        command = python_module("pagestream", "models", "pull", settings.model)
        return Service("model", "model", command, environ)
    return None
