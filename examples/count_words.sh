#!/bin/sh
# Counts the words of the files in a folder; each worker counts a part.  A worker can be any program, with or without
# torch.
#
#     ripstop run --standalone --nproc-per-node=4 --max-restarts=3 --no-python sh examples/count_words.sh IN OUT
#
# A finished file has its final name, so that a restarted worker does not count it again.
set -eu
in=$1 out=$2
mkdir -p "$out"
echo "worker $RANK is process $$"
number=0
for file in "$in"/*; do
    mine=$((number % WORLD_SIZE))
    number=$((number + 1))
    done=$out/$(basename "$file").count
    if [ "$mine" != "$RANK" ] || [ -e "$done" ]; then
        continue
    fi
    wc -w <"$file" >"$done.new.$RANK"
    mv "$done.new.$RANK" "$done"
    echo "worker $RANK counted $file"
    sleep "${PAUSE:-0}"
done
