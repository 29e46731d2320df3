#!/usr/bin/env bash
# Measures a machine's NVIDIA card with the program that lies beside this script, and keeps all
# results in one folder:
#
#     FOLDER/gpu-run.sh [--out RESULTS] [STAGE...]
#
# Stages, in order; without a name, the first six:
#
#     quick      every kernel against the f64 reference at small sizes (1 minute)
#     full       every kernel against the f64 reference at all sizes and in all types: 4 minutes of
#                work, most of it the reference's on the processor, in shares side by side
#     torch      PyTorch's FlashAttention and training steps, if python3 has PyTorch (1 minute)
#     timings    attention over lengths, beside PyTorch's where that ran (1 minute)
#     training   whole training steps at the preset's own vocabulary, beside PyTorch's, plain and
#                with torch.compile, if python3 has it (2 minutes)
#     parts      whole training steps with forget gates, short convolutions, output gates and norms,
#                and windows, of PRESET, and of `code` at 4,096 and 8,192 tokens, there behind an
#                exact first layer too (1 minute)
#     sanitize   compute-sanitizer over the quick checks of attention and gates: memory accesses,
#                then races (2 minutes)
#     profile    ncu over attention and over training steps: how long each kernel runs, and what
#                holds it up (2 minutes); scripts/cuda_profile.py makes tables of what it wrote
#
# SHARES is the number of shares of the full checks: one for each core, at most 12, unless it is
# given. MINUTES bounds a stage of checks or timings, SECONDS_EACH one run of a tool. PRESET, BATCH
# and STEPS say what is trained. scripts/cuda-pack.sh makes the folder. The machine needs a driver
# and CUDA 13's libraries, which PyTorch's packages have too; NVRTC only if a kernel is needed that
# did not come with the program.
#
# One stage that fails does not stop the others; each result is written as soon as it is known. The
# same command again goes on where the first was ended, by whatever: what is finished is not done
# anew, but for sanitize and profile, which begin anew. Another RESULTS begins from the start.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
results=$PWD/gpu-results
if [ "${1:-}" = --out ]; then
    results=${2:?--out needs a folder}
    shift 2
fi
mkdir -p "$results" && results=$(cd "$results" && pwd) || { echo 'cannot make the folder of results' >&2; exit 1; }

# Processes of an earlier run that was killed hold this too, as long as they live.
if command -v flock >/dev/null; then
    exec 9>"$results/lock"
    if ! flock -w 10 9; then
        echo "another run still writes to $results: wait for its end, or name another folder with --out" >&2
        exit 1
    fi
fi

# The program and its kernels, as they are or compressed for the journey. What is unpacked gets its
# name when it is whole.
python() { command -v python3 >/dev/null || { echo 'there is neither xz nor python3 to unpack the program with' >&2; exit 1; }; python3 "$@"; }
program=$here/performer-lm
if [ -f "$program.xz" ] && { [ ! -x "$program" ] || [ "$program.xz" -nt "$program" ]; }; then
    if command -v xz >/dev/null; then
        xz -dc "$program.xz" >"$program.new"
    else
        python -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' "$program.xz" "$program.new"
    fi || { echo "$program.xz cannot be unpacked" >&2; exit 1; }
    chmod +x "$program.new"
    mv "$program.new" "$program"
fi
if [ -f "$here/kernels.tar.xz" ] && { [ ! -d "$here/kernels" ] || [ "$here/kernels.tar.xz" -nt "$here/kernels" ]; }; then
    rm -rf "$here/unpacked"
    mkdir "$here/unpacked"
    if command -v xz >/dev/null; then
        xz -dc "$here/kernels.tar.xz" | tar -x -C "$here/unpacked"
    else
        python -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$here/kernels.tar.xz" "$here/unpacked"
    fi || { echo "$here/kernels.tar.xz cannot be unpacked" >&2; exit 1; }
    rm -rf "$here/kernels"
    mv "$here/unpacked/kernels" "$here/kernels"
    # The archive has no times of its own, and a newer one replaces what was unpacked.
    touch "$here/kernels"
    rmdir "$here/unpacked"
fi

# One folder holds what one program measured: results that an earlier one left would be taken for
# finished.
of_program=$([ ! -f "$program" ] || cksum <"$program")
if [ "$(cat "$results/program.cksum" 2>/dev/null)" != "$of_program" ] &&
    { compgen -G "$results/*.cksum" || compgen -G "$results/*.json*"; } >/dev/null; then
    echo "$results holds what another program measured: name another folder with --out" >&2
    exit 1
fi

# CUDA's libraries: beside the program, where the linker looks, or wherever a toolkit or PyTorch put
# them.
in_path() {
    local folder IFS=:
    for folder in ${LD_LIBRARY_PATH:-}; do
        [ ! -e "$folder/$1" ] || return 0
    done
    return 1
}
for name in libcublas.so.13 libcublasLt.so.13 libcudart.so.13 libcurand.so.10 libnvrtc.so.13; do
    if [ -e "$here/$name" ] || in_path "$name" || grep -q "$name" <<<"$(ldconfig -p 2>/dev/null)"; then
        continue
    fi
    found=$(find /usr/local /usr/lib /opt "${HOME:-/root}" -name "$name" -not -path '*/stubs/*' 2>/dev/null | head -1)
    if [ -n "$found" ]; then
        LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$(dirname "$found")
    elif [ "$name" = libnvrtc.so.13 ] && [ -d "$here/kernels" ]; then
        echo 'this machine has no libnvrtc.so.13: kernels that did not come with the program cannot be compiled here' >&2
    else
        echo "this machine has no $name: install CUDA 13's libraries, or pack them with the program" >&2
        exit 1
    fi
done
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
export PERFORMER_KERNELS=${PERFORMER_KERNELS:-$results/kernels}

# check NAME OPTION...: gpu-check into NAME.json, from the beginning or from where it was ended.
check() {
    local name=$1
    shift
    [ ! -s "$results/$name.jsonl" ] || set -- --resume "$@"
    "$program" gpu-check --device "${DEVICE:-cuda}" "$@" --out "$results/$name.json"
}

# share NAME OPTION...: as check, by SHARES processes side by side that keep lines of their own,
# which are joined when all of them have ended; what is missing then is done by one process.
share() {
    local name=$1 cores shares k
    shift
    cores=$(nproc 2>/dev/null || echo 1)
    shares=${SHARES:-$((cores < 12 ? cores : 12))}
    if [ ! -s "$results/$name.jsonl" ]; then
        local processes=()
        for ((k = 1; k <= shares; k++)); do
            check "$name-$k" "$@" --share "$k/$shares" >"$results/$name-$k.txt" 2>&1 &
            processes+=($!)
        done
        # A failed check fails the joined one too.
        wait "${processes[@]}" || true
        cat "$results/$name"-*.jsonl >"$results/$name.jsonl.new" && mv "$results/$name.jsonl.new" "$results/$name.jsonl" || return 1
    fi
    check "$name" "$@"
}

# into FILE COMMAND...: the command's output as that file of results, once it is whole; not if it is
# there already, which is an error where another command made it, such as that of another PRESET.
into() {
    local file=$results/$1 command
    shift
    # Neither where the folders lie, nor the time that it may take, nor the results that it is set
    # beside make it another command.
    command=${*//"$results/"/}
    command=$(sed -E 's/^timeout [^ ]+ //; s/ --against [^ ]+//g' <<<"${command//"$here/"/}")
    if [ -s "$file" ]; then
        if [ -f "$file.command" ] && [ "$(cat "$file.command")" != "$command" ]; then
            echo "$file is of another command: name another folder with --out. The other is" >&2
            cat "$file.command" >&2
            return 1
        fi
        echo "$file is there already" >&2
        return 0
    fi
    "$@" >"$file.new" && echo "$command" >"$file.command" && mv "$file.new" "$file" || { rm -f "$file.new"; return 1; }
}

# The work of one item without the process that oversees it, for tools that look at a process.
item() {
    local name=$1
    shift
    : >"$results/item.jsonl"
    "$@" "$program" gpu-check --device "${DEVICE:-cuda}" $extent --only "$name" --out "$results/item.json" --work inf
}

has_torch() {
    python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

stage() {
    local against=() preset=${PRESET:-stories15m} batch=${BATCH:-64} training
    training=(--data sample --device "${DEVICE:-cuda}" --dtype bf16 --preset "$preset" --batch-size "$batch" --micro-batch "$batch")
    case $1 in
        quick) check quick --quick --only-checks ;;
        full) share full --only-checks --minutes "${MINUTES:-10}" ;;
        torch)
            if ! has_torch; then
                echo 'python3 has no PyTorch with CUDA: no timings of it' >&2
                return 0
            fi
            into torch-attention.json python3 "$here/torch_attention.py" --device cuda --dtype bf16 --heads 64 --features 128 \
                --milliseconds 200 --tokens 512,1024,2048,4096,8192,16384
            ;;
        timings)
            if [ -f "$results/torch-attention.json" ]; then
                against=(--against "$results/torch-attention.json")
            fi
            check timings --only-timings --minutes "${MINUTES:-10}" "${against[@]}"
            ;;
        training)
            local work how failed=0 beside=()
            for work in softmax favor:m=128; do
                into "train-${work%%:*}.json" "$program" bench train "${training[@]}" ${STEPS:+--steps "$STEPS"} --attention "$work" --json || failed=1
                [ ! -s "$results/train-${work%%:*}.json" ] || beside+=(--against "$results/train-${work%%:*}.json")
            done
            if has_torch; then
                for how in '' --compile; do
                    into "torch-train$how.json" timeout "${SECONDS_EACH:-150}" python3 "$here/torch_train.py" --preset "$preset" \
                        --device cuda --dtype bf16 --features 128 --batch-size "$batch" "${beside[@]}" $how || failed=1
                done
            fi
            return "$failed"
            ;;
        parts)
            local p=gate,conv,output-gate,output-norm context tokens=$((batch * 1024)) failed=0
            local t=favor:map=taylor2,key-dim=16,$p
            into parts.json "$program" bench train "${training[@]}" ${STEPS:+--steps "$STEPS"} --attention softmax --attention favor:m=128 \
                --attention favor:m=128,gate --attention favor:m=128,gate,conv --attention softmax:gate,conv --attention softmax:window=66 \
                --json || failed=1
            training=(--data sample --device "${DEVICE:-cuda}" --dtype bf16 --preset code)
            for context in 4096 8192; do
                batch=$((tokens / context > 0 ? tokens / context : 1))
                into "code-$context.json" "$program" bench train "${training[@]}" --context "$context" --batch-size "$batch" \
                    --micro-batch "$batch" --steps "${STEPS:-20}" --attention softmax --attention "softmax:$p" --attention favor:m=128 \
                    --attention "favor:m=128,$p" --attention "$t" --attention "softmax:window=75,$p" --attention "softmax:window=1000,$p" \
                    --attention "favor:m=128,$p+softmax:$p/first" --attention "$t+softmax:$p/first" \
                    --attention "softmax:window=75,$p+softmax:$p/first" --attention "softmax:window=75,$p+softmax:window=1000,$p/first" \
                    --attention "uniform:$p+softmax:$p/first" --json || failed=1
            done
            return "$failed"
            ;;
        sanitize)
            command -v compute-sanitizer >/dev/null || { echo 'there is no compute-sanitizer here' >&2; return 1; }
            local tool work code failed=0 extent=--quick
            for tool in memcheck racecheck; do
                : >"$results/sanitizer-$tool.txt"
                for work in 'causal, 1x2' 'forget gates' 'output gates' 'attention by'; do
                    rm -f "$results/sanitizer.txt"
                    item "$work" timeout "${SECONDS_EACH:-150}" compute-sanitizer --tool "$tool" --error-exitcode 9 \
                        --log-file "$results/sanitizer.txt"
                    code=$?
                    [ "$code" -eq 0 ] || failed=1
                    cat "$results/sanitizer.txt" 2>/dev/null >>"$results/sanitizer-$tool.txt"
                    echo "$tool of $work: exit code $code" | tee -a "$results/sanitizer-$tool.txt"
                done
            done
            rm -f "$results/sanitizer.txt"
            return "$failed"
            ;;
        profile)
            command -v ncu >/dev/null || { echo 'there is no ncu here' >&2; return 1; }
            local work failed=0 extent=
            for work in 'favor, 8192 tokens, both' 'softmax, 8192 tokens, both'; do
                # After the warm-up; every kernel of two passes.
                item "$work" timeout "${SECONDS_EACH:-150}" ncu --clock-control none --kernel-name 'regex:favor|softmax' --launch-skip 16 \
                    --launch-count 8 --set full --page details --log-file "$results/profile-${work%%,*}.txt" || failed=1
            done
            # How long each kernel of training steps runs, of which scripts/cuda_profile.py makes
            # tables.
            local p=gate,conv,output-gate,output-norm command number=0
            command=(ncu --clock-control none --metrics gpu__time_duration.sum --launch-skip 1400 --launch-count 1100 --csv)
            training=(bench train --data sample --device "${DEVICE:-cuda}" --dtype bf16 --preset code --context 8192 --batch-size 8
                --micro-batch 8 --steps 4 --json --attention)
            echo "${command[*]} performer-lm ${training[*]} ATTENTION" >"$results/steps.command"
            for work in "softmax:$p" "favor:m=128,$p" "favor:map=taylor2,key-dim=16,$p"; do
                number=$((number + 1))
                echo "$work" >"$results/steps-$number.attention"
                timeout "${SECONDS_EACH:-150}" "${command[@]}" --log-file "$results/steps-$number.csv" "$program" "${training[@]}" "$work" \
                    >/dev/null || failed=1
            done
            return "$failed"
            ;;
        *) echo "there is no stage $1: see the head of $0" >&2; return 2 ;;
    esac
}

[ $# -gt 0 ] || set -- quick full torch timings training parts
[ -z "$of_program" ] || echo "$of_program" >"$results/program.cksum"
failed=0
for name in "$@"; do
    printf '== %s, %s\n' "$name" "$(date +%T)" >&2
    stage "$name" || { echo "stage $name failed" >&2; failed=1; }
done
printf '== done, %s\n' "$(date +%T)" >&2
exit $failed
