#!/usr/bin/env bash
# open_clip.sh: open_clip, whose losses the contrastive ones are compared with. Its other requirements stay out, since
# torchvision would bring a CUDA build of torch along; the module of losses needs torch alone.
PEER=open_clip
source "$(dirname "$0")/common.sh"
environment "$(grep -E '^numpy==' constraints.txt)"
"$BIN/python" -m pip install -q --no-deps open_clip_torch==3.3.0
