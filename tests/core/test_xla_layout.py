"""cuda_src/host/xla.h against the header that jaxlib brings: sizes, offsets and numbers."""

import re
import subprocess
from pathlib import Path

import pytest

HOST = Path(__file__).parents[2] / "cuda_src" / "host"

# Ours, XLA's, and our members as XLA names them; "+" where XLA's struct goes on after the mirror's end.
STRUCTS = """
ApiVersion: XLA_FFI_Api_Version size=struct_size extension=extension_start major=major_version minor=minor_version
ErrorCreateArgs: XLA_FFI_Error_Create_Args size=struct_size extension=extension_start message=message code=errc
ErrorDestroyArgs: XLA_FFI_Error_Destroy_Args size=struct_size extension=extension_start error=error
AllocateArgs: XLA_FFI_DeviceMemory_Allocate_Args size=struct_size extension=extension_start context=ctx bytes=size
AllocateArgs: XLA_FFI_DeviceMemory_Allocate_Args alignment=alignment data=data
FreeArgs: XLA_FFI_DeviceMemory_Free_Args size=struct_size extension=extension_start context=ctx bytes=size data=data
StreamGetArgs: XLA_FFI_Stream_Get_Args size=struct_size extension=extension_start context=ctx stream=stream
Buffer: XLA_FFI_Buffer size=struct_size extension=extension_start dtype=dtype data=data rank=rank dims=dims
ByteSpan: XLA_FFI_ByteSpan data=ptr size=len
Buffers: XLA_FFI_Args size=struct_size extension=extension_start n=size types=types buffers=args
Buffers: XLA_FFI_Rets size=struct_size extension=extension_start n=size types=types buffers=rets
Attrs: XLA_FFI_Attrs size=struct_size extension=extension_start n=size types=types names=names values=attrs
Extension: XLA_FFI_Extension_Base size=struct_size type=type next=next
MetadataExtension: XLA_FFI_Metadata_Extension metadata=metadata
Metadata: XLA_FFI_Metadata size=struct_size version=api_version traits=traits +
Api: XLA_FFI_Api size=struct_size extension=extension_start version=api_version internal=internal_api +
Api: XLA_FFI_Api error_create=XLA_FFI_Error_Create error_get_message=XLA_FFI_Error_GetMessage +
Api: XLA_FFI_Api error_destroy=XLA_FFI_Error_Destroy handler_register=XLA_FFI_Handler_Register +
Api: XLA_FFI_Api stream_get=XLA_FFI_Stream_Get +
Api: XLA_FFI_Api allocate=XLA_FFI_DeviceMemory_Allocate free=XLA_FFI_DeviceMemory_Free +
CallFrame: XLA_FFI_CallFrame size=struct_size extension=extension_start api=api context=ctx stage=stage +
CallFrame: XLA_FFI_CallFrame args=args rets=rets attrs=attrs +
"""

NUMBERS = """
ErrorCode::invalid_argument XLA_FFI_Error_Code_INVALID_ARGUMENT
ErrorCode::unimplemented    XLA_FFI_Error_Code_UNIMPLEMENTED
ErrorCode::internal         XLA_FFI_Error_Code_INTERNAL
AttrType::string            XLA_FFI_AttrType_STRING
Stage::execute              XLA_FFI_ExecutionStage_EXECUTE
ExtensionType::metadata     XLA_FFI_Extension_Metadata
kCommandBufferCompatible    XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
"""


# The letters of XLA's dtypes, and their bits.
KINDS = {"S": "int 8 16 32 64", "U": "uint 8 16 32 64", "F": "float 16 32 64", "BF": "bfloat 16", "C": "complex 64 128"}
EIGHT_BITS = {"F8E4M3FN": "float8_e4m3fn", "F8E5M2": "float8_e5m2"}


def dtypes():
    yield "PRED", "bool"
    yield from EIGHT_BITS.items()
    for letter, kind in KINDS.items():
        name, *bits = kind.split()
        yield from ((letter + n, name + n) for n in bits)


def assertions():
    for line in STRUCTS.strip().splitlines():
        ours, theirs, *members = line.replace(":", "").split()
        if members[-1] != "+":
            yield f"static_assert(sizeof({ours}) == sizeof({theirs}));"
        for mine, its in (m.split("=") for m in members if m != "+"):
            yield f"static_assert(offsetof({ours}, {mine}) == offsetof({theirs}, {its}));"
            yield f"static_assert(sizeof({ours}::{mine}) == sizeof({theirs}::{its}));"
    for line in NUMBERS.strip().splitlines():
        ours, theirs = line.split()
        yield f"static_assert(static_cast<int>({ours}) == static_cast<int>({theirs}));"
    for theirs, name in dtypes():
        yield f'static_assert(std::string_view(kDataTypes[XLA_FFI_DataType_{theirs}]) == "{name}");'
    names = re.findall(r'"\w+"', (HOST / "xla.h").read_text().partition("kDataTypes[] = {")[2].partition("}")[0])
    assert len(names) == len(list(dtypes()))


def test_mirror_has_the_layout_of_xla(tmp_path):
    pytest.importorskip("jax")
    try:
        from jax import ffi
    except ImportError:  # before JAX 0.5
        from jax.extend import ffi
    source = tmp_path / "layout.cpp"
    headers = ("<string_view>", '"xla.h"', '"xla/ffi/api/c_api.h"')
    lines = [*(f"#include {header}" for header in headers), "using namespace aot::xla;", *assertions()]
    source.write_text("\n".join(lines) + "\n")
    include = ["-I", HOST, "-isystem", ffi.include_dir()]
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", *include, source]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
