"""Writes the enums, structs and function table of crates/pjrt/src/abi.rs below its hand-written head.

Slot order, field offsets and sizes come from `pypjrt/_abi/pjrt_0_114.py` of the Apache-2.0 wheel `pypjrt` 0.1.1, which libclang
made from the PJRT 0.114 header. The Rust compiler checks offsets and sizes."""

import ctypes
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile
from types import SimpleNamespace

WHEEL = "pypjrt==0.1.1"
MEMBER = "pypjrt/_abi/pjrt_0_114.py"
OUT = pathlib.Path(__file__).resolve().parents[1] / "crates/pjrt/src/abi.rs"

WITHOUT_ERROR = ["Error_Destroy", "Error_Message"]
# Structs that are not the argument of a call, each after the structs it contains.
STRUCTS = """
Api_Version NamedValue ShapeSpec Program Buffer_MemoryLayout_Tiled Buffer_MemoryLayout ExecuteOptions
KeyValueGetCallback_Args KeyValueTryGetCallback_Args KeyValuePutCallback_Args
""".split()
ENUMS = {
    "ErrorCode": ("PJRT_Error_Code_", "PJRT_Error_Code"), "BufferType": ("PJRT_Buffer_Type_", "PJRT_Buffer_Type"),
    "NamedValueType": ("PJRT_NamedValue_k", "PJRT_NamedValue_Type"),
    "HostBufferSemantics": ("PJRT_HostBufferSemantics_k", "PJRT_HostBufferSemantics"),
    "MemoryLayoutType": ("PJRT_Buffer_MemoryLayout_Type_", "PJRT_Buffer_MemoryLayout_Type"),
}
# Unused constants: sub-byte element types and unsupported options.
LEFT_OUT = "INVALID S1 S2 S4 U1 U2 U4 F4E2M1FN F6E2M3FN F6E3M2FN TOKEN MUTABLE_ZERO_COPY STRIDES".split()
# Unions and function pointers, whose types the table lacks, by field.
DELETER = 'Option<unsafe extern "C" fn(*mut c_void)>'
CALLBACK = 'Option<unsafe extern "C" fn(*mut c_void, *mut c_void)>'
TYPES = {
    "kv_get_callback": "ApiFunction<KeyValueGetCallbackArgs>", "kv_put_callback": "ApiFunction<KeyValuePutCallbackArgs>",
    "kv_try_get_callback": "ApiFunction<KeyValueTryGetCallbackArgs>", "callback_error": "*const CallbackError",
    "callback": CALLBACK, "on_delete_callback": CALLBACK, "value_deleter_callback": DELETER,
    "_anon5": "u64", "_anon2": "BufferMemoryLayoutTiled",
}
NAMES = {"_anon5": "value", "_anon2": "tiled", "type": "kind"}


def snake(name):
    name = name.replace("DmaMap", "Dma_Map").replace("DmaUnmap", "Dma_Unmap")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("__", "_")


def camel(name):
    return "".join(part[0].upper() + part[1:] for part in name.split("_"))


def rust_type(field, kind):
    if field in TYPES or field.endswith("_deleter"):
        return TYPES.get(field, DELETER)
    if issubclass(kind, ctypes.Structure):
        return camel(kind.__name__.removeprefix("PJRT_"))
    if kind in (ctypes.c_void_p, ctypes.c_bool):
        return "bool" if kind is ctypes.c_bool else "*mut c_void"
    signed, width = kind(-1).value < 0, ctypes.sizeof(kind) * 8
    # size_t is the only unsigned 64-bit type of the header.
    return "usize" if not signed and width == 64 else f"{'i' if signed else 'u'}{width}"


def enum(header, name, prefix, source):
    yield from (f"/// `{source}`.", f"pub mod {snake(name)} {{")
    for key, value in vars(header).items():
        rest = key.removeprefix(prefix)
        constant = rest if rest == rest.upper() else snake(rest).upper()
        wanted = key.startswith(prefix) and not key.endswith("STRUCT_SIZE") and constant not in LEFT_OUT
        if wanted and isinstance(value, int):
            yield f"    pub const {constant}: u32 = {value};"
    yield from ("}", "")


def struct(header, name, call=""):
    layout = getattr(header, f"PJRT_{name}")
    yield f"    {camel(name)} [{ctypes.sizeof(layout)}]{call} {{"
    for field, kind in layout._fields_[2:]:
        yield f"        {NAMES.get(field, field)}: {rust_type(field, kind)} = {getattr(layout, field).offset},"
    yield "    }"


def slots(header, calls):
    skipped = 0
    for call in (name.removeprefix("PJRT_") for name in [*header.FUNCTIONS, ""]):
        if call and call not in calls:
            skipped += 1
            continue
        if skipped:
            yield f"    pub skipped_before_{snake(call) or 'the_end'}: [Slot; {skipped}],"
        skipped = 0
        if call in WITHOUT_ERROR:
            yield f'    pub {snake(call)}: Option<unsafe extern "C" fn(*mut {camel(call)}Args)>,'
        elif call:
            yield f"    pub {snake(call)}: ApiFunction<{camel(call)}Args>,"


with tempfile.TemporaryDirectory() as folder:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, WHEEL]
    subprocess.run(pip, check=True)
    header = SimpleNamespace(**runpy.run_path(f"{folder}/{MEMBER}"))
head, mark, _ = OUT.read_text().partition("/// `PJRT_Error_Code`.\n")
version = f"VERSION: (i32, i32) = ({header.PJRT_API_MAJOR}, {header.PJRT_API_MINOR});"
if not mark or version not in head:
    sys.exit(f"gen_pjrt_abi.py: the hand-written head of {OUT} must have `{version}`, and `{mark.strip()}` after it")
# The calls whose arguments the crate names. Other slots of the table are arrays of untyped pointers.
sources = "".join(file.read_text() for file in OUT.parent.rglob("*.rs") if file != OUT)
calls = [name[5:] for name in header.FUNCTIONS if f"abi::{camel(name[5:])}Args" in sources]
lines = [line for name, (prefix, source) in ENUMS.items() for line in enum(header, name, prefix, source)]
lines.append("structs! {")
for name in STRUCTS:
    lines += struct(header, name)
for call in calls:
    lines += struct(header, f"{call}_Args", "" if call in WITHOUT_ERROR else f' "PJRT_{call}" {snake(call)}')
end = header.VTABLE_OFFSET + 8 * header.FUNCTIONS.index(f"PJRT_{calls[-1]}")
slot_lines = "\n".join(slots(header, calls))
OUT.write_text(head + "\n".join(lines) + f"""
}}

/// The function table (`PJRT_Api`). New versions only append slots.
#[repr(C)]
pub struct Api {{
    pub struct_size: usize,
    pub extension_start: *mut c_void,
    pub version: ApiVersion,
{slot_lines}
}}
const _: () = assert!(
    size_of::<Api>() == {ctypes.sizeof(header.PJRT_Api)}
        && std::mem::offset_of!(Api, {snake(header.FUNCTIONS[0][5:])}) == {header.VTABLE_OFFSET}
        && std::mem::offset_of!(Api, {snake(calls[-1])}) == {end}
);
// SAFETY: `repr(C)`, plain data, `struct_size` first.
unsafe impl Struct for Api {{}}
""")
subprocess.run(["rustfmt", "--edition", "2024", str(OUT)], check=True)
