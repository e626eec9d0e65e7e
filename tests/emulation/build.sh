#!/bin/bash
# build.sh SOURCE_TREE OUT [flags]: compiles one emulated .cu (relative) - helper during development
set -e
HERE=$(dirname "$(readlink -f "$0")")
TREE=$1; FILE=$2; OUT=$3; shift 3
FLAGS="-std=c++20 -O2 -g1 -mavx2 -mfma -mf16c -ffp-contract=off -fno-strict-aliasing -fno-threadsafe-statics -w -I$TREE/src -I$TREE/tests -isystem /usr/local/cuda/include $*"
g++ $FLAGS -x c++ -include $HERE/cuda_emulator.h -E $TREE/$FILE -o $OUT.ii
python3 $HERE/rewrite.py $OUT.ii $OUT.rw.ii
g++ $FLAGS -x c++-cpp-output -c $OUT.rw.ii -o $OUT
