import os
import sys

rank = os.environ["RANK"]
for i in range(int(sys.argv[1])):
    print(f"out {rank} {i}")
    print(f"err {rank} {i}", file=sys.stderr)
