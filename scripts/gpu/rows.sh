# Sourced by scripts whose arguments are LTX2 OUT [ROW…]. `row NAME GPUS ARGUMENTS…` calls their function
# `measure NAME ARGUMENTS…` if the row was asked for and this machine has at least that many GPUs.
ltx2=$1 out=$2
shift 2
wanted=" $* "
mkdir -p "$out"
gpus=$(nvidia-smi -L | wc -l)
# NVLink multicast needs rights on the switch; nothing here uses it.
export NCCL_NVLS_ENABLE=0
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
