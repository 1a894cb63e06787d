"""A network of its own for a process: a namespace joined to the host by a cable that can be cut.

Needs root and iproute2; nothing is left after the block. Only TCP crosses it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_numbers = itertools.count(1)


class Cable:
    """The joint between the host and one namespace."""

    def __init__(self, number: int) -> None:
        self.namespace = f"ps{os.getpid()}n{number}"
        # Four addresses each, and others than those of a test that runs beside this one.
        first = (os.getpid() % 256 * 64 + number % 64) * 4
        self.host = f"10.213.{first // 256}.{first % 256 + 1}"
        self.prefix = ("ip", "netns", "exec", self.namespace)
        self._here, self._there = f"ps{os.getpid() % 10**6}h{number}", f"ps{number}t"
        self._guest = f"10.213.{first // 256}.{first % 256 + 2}"

    def lay(self) -> None:
        """Make the namespace, and both ends of the cable."""
        here, there, inside = self._here, self._there, self.namespace
        _ip("netns", "add", inside)
        _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", inside)
        _ip("address", "add", f"{self.host}/30", "dev", here)
        _ip("-n", inside, "address", "add", f"{self._guest}/30", "dev", there)
        _ip("-n", inside, "link", "set", "lo", "up")
        _ip("-n", inside, "link", "set", there, "up")
        self.heal()

    def cut_off(self) -> None:
        """Nothing passes, and nobody is told."""
        _ip("link", "set", self._here, "down")

    def heal(self) -> None:
        """Let everything pass again."""
        _ip("link", "set", self._here, "up")

    def remove(self) -> None:
        """Take the namespace away, and with it both ends."""
        subprocess.run(["ip", "netns", "del", self.namespace], check=False, capture_output=True)


def why_impossible() -> str | None:
    """Say in a sentence why this machine cannot do it; None if it can."""
    if os.geteuid() != 0:
        return "making a network namespace needs root"
    if shutil.which("ip") is None:
        return "needs the program ip of iproute2"
    try:
        with cables(1):
            return None
    except subprocess.CalledProcessError as error:  # root, but without the right to do it
        return f"cannot make a network namespace: {error.stderr.decode().strip()}"


@contextmanager
def cables(count: int) -> Iterator[list[Cable]]:
    """So many namespaces, while the block lasts."""
    laid = [Cable(next(_numbers)) for _ in range(count)]
    try:
        for cable in laid:
            cable.lay()
        yield laid
    finally:
        for cable in laid:
            cable.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
