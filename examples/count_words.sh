#!/bin/sh
# Counts the words of the files in a folder, each worker its share: any program can be a worker, torch or not.
#
#     ripstop run --standalone --nproc-per-node=4 --max-restarts=3 --no-python sh examples/count_words.sh IN OUT
#
# What is done is on disk, whole, under its final name; so a worker that was killed does not do it again.
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
