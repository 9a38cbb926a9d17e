# Sourced by scripts whose arguments are LTX2 OUT [ROW…]: `row NAME GPUS ARGUMENTS…` calls their `measure NAME ARGUMENTS…`
# where the row is wanted and this machine has so many GPUs, and says so where it has not.
ltx2=$1 out=$2
shift 2
wanted=" $* "
mkdir -p "$out"
gpus=$(nvidia-smi -L | wc -l)
row() {
    local name=$1 needed=$2
    shift 2
    [[ "$wanted" == "  " || "$wanted" == *" $name "* ]] || return 0
    if [ "$gpus" -lt "$needed" ]; then
        echo "$name: not measured: $gpus of $needed GPUs"
        return
    fi
    echo "== $name: $*"
    measure "$name" "$@"
}
