# An image for `lightning-eff launch k8s`: docker build -t lightning-eff .
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
COPY . /opt/lightning_eff
# torch is the image's own.
RUN pip install --no-cache-dir --constraint /opt/lightning_eff/constraints.txt '/opt/lightning_eff[hf]'
WORKDIR /workspace
ENTRYPOINT []
