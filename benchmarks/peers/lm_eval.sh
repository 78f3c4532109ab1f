#!/usr/bin/env bash
# lm_eval.sh: EleutherAI's lm-evaluation-harness, which our questions with choices are compared with. Its other
# requirements stay out, since they belong to tasks and metrics that are not asked.
PEER=lm_eval
source "$(dirname "$0")/common.sh"
environment "$(grep -E '^transformers==' constraints.txt)" "$(grep -E '^numpy==' constraints.txt)" pydantic jinja2 scikit-learn
"$BIN/python" -m pip install -q --no-deps lm-eval==0.4.13 datasets==5.2.0 evaluate==0.4.6 accelerate==1.15.0 \
  peft==0.21.2 pyarrow==26.0.1 multiprocess dill xxhash fsspec pandas python-dateutil pytz httpx anyio h11 httpcore sniffio \
  psutil sacrebleu rouge-score absl-py nltk portalocker colorama tabulate lxml pytablewriter DataProperty mbstrdecoder \
  pathvalidate tabledata tcolorpy typepy chardet sqlitedict word2number more_itertools jsonlines zstandard requests urllib3 certifi idna charset-normalizer
