# syntax=docker/dockerfile:1
# docker build --target cpu .    a server on a plain CPU
# docker build --target gpu .    a server on an NVIDIA GPU; the host needs its driver and the NVIDIA container toolkit

FROM python:3.12-slim-bookworm AS base
# numba and Triton compile at run time, and the embedded model is unpacked: both are kept in this volume.
ENV SGLANG_QEVICT_CACHE=/cache/models NUMBA_CACHE_DIR=/cache/numba TRITON_CACHE_DIR=/cache/triton \
    HF_HOME=/cache/huggingface PIP_NO_CACHE_DIR=1
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential libnuma1 curl \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/sglang-qevict
COPY pyproject.toml README.md LICENSE ./
COPY sglang_qevict sglang_qevict
COPY tiers tiers
COPY kernels kernels
COPY monitoring/qevict_monitoring monitoring/qevict_monitoring
RUN pip install .
COPY configs configs
VOLUME /cache
EXPOSE 30000
HEALTHCHECK --interval=10s --start-period=10m CMD curl --fail --silent http://127.0.0.1:30000/health || exit 1

FROM base AS cpu
# Without --model-path: the embedded model.
CMD ["sh", "-c", "exec sglang serve --config configs/serve.yaml --model-path \"$(sglang-qevict fetch-model)\" --host 0.0.0.0 --port 30000"]

FROM base AS gpu
CMD ["sglang", "serve", "--config", "configs/serve-gpu.yaml", "--model-path", "meta-llama/Llama-3.1-8B-Instruct", "--host", "0.0.0.0", "--port", "30000"]
