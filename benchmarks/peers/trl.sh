#!/usr/bin/env bash
# trl.sh: TRL and PEFT, which the losses, labels and adapters of alignment are compared with. Their other requirements
# stay out, since torchvision would bring a CUDA build of torch along.
PEER=trl
source "$(dirname "$0")/common.sh"
environment "$(grep -E '^transformers==' constraints.txt)" "$(grep -E '^numpy==' constraints.txt)" pydantic psutil
"$BIN/python" -m pip install -q --no-deps trl==1.16.0 peft==0.21.2 accelerate==1.15.0 datasets==5.2.0 pyarrow==26.0.1 \
  multiprocess dill xxhash fsspec pandas python-dateutil pytz httpx anyio h11 httpcore sniffio
