// Runs an operator of libaotops.so in XLA, without Python: `xla PLUGIN`, the path of a PJRT plugin for the CPU, such as
// the libpjrt_cpu.so of github.com/zml/pjrt-artifacts. The headers of xla/pjrt/c are from github.com/openxla/xla.
#include <aotops.h>
#include <dlfcn.h>
#include <xla/pjrt/c/pjrt_c_api.h>
#include <xla/pjrt/c/pjrt_c_api_ffi_extension.h>

#include <cstdio>
#include <cstdlib>
#include <string>

// The result of a function of PJRT, whose arguments are a struct that begins with its size.
#define PJRT(function, args) (args.struct_size = sizeof args, check(api, #function, api->PJRT_##function(&args)))

static void check(const PJRT_Api *api, const char *what, PJRT_Error *error) {
  if (!error) return;
  PJRT_Error_Message_Args message{};
  message.struct_size = sizeof message, message.error = error;
  api->PJRT_Error_Message(&message);
  std::fprintf(stderr, "%s: %.*s\n", what, static_cast<int>(message.message_size), message.message);
  std::exit(1);
}

static PJRT_FFI_Register_Handler *registration(const PJRT_Api *api) {
  for (PJRT_Extension_Base *e = api->extension_start; e; e = e->next)
    if (e->type == PJRT_Extension_Type_FFI) return reinterpret_cast<PJRT_FFI_Extension *>(e)->register_handler;
  return nullptr;
}

// GELU of five numbers, as JAX lowers a call of the operator.
static std::string program = R"(
  func.func @main(%x: tensor<5xf32>) -> tensor<5xf32> {
    %y = stablehlo.custom_call @aotops(%x) {
      api_version = 4 : i32, backend_config = {entry = "aot_gelu", attrs = "approximate=none"}
    } : (tensor<5xf32>) -> tensor<5xf32>
    return %y : tensor<5xf32>
  })";

int main(int argc, char **argv) {
  void *plugin = argc == 2 ? dlopen(argv[1], RTLD_NOW) : nullptr;
  if (!plugin) return std::fprintf(stderr, "usage: xla PLUGIN\n%s\n", argc == 2 ? dlerror() : ""), 2;
  const PJRT_Api *api = reinterpret_cast<const PJRT_Api *(*)()>(dlsym(plugin, "GetPjrtApi"))();

  PJRT_FFI_Register_Handler_Args target{};
  target.struct_size = sizeof target;
  target.target_name = "aotops", target.target_name_size = 6;
  target.handler = reinterpret_cast<void *>(aot_xla_cpu);
  target.platform_name = "Host", target.platform_name_size = 4;
  PJRT_FFI_Register_Handler *register_handler = registration(api);
  if (!register_handler) return std::fprintf(stderr, "the plugin registers no handlers\n"), 1;
  check(api, "register_handler", register_handler(&target));

  PJRT_Plugin_Initialize_Args initialize{};
  PJRT(Plugin_Initialize, initialize);
  PJRT_Client_Create_Args client{};
  PJRT(Client_Create, client);
  PJRT_Program code{};
  code.struct_size = sizeof code;
  code.code = program.data(), code.code_size = program.size(), code.format = "mlir", code.format_size = 4;
  PJRT_Client_Compile_Args compile{};
  // A CompileOptionsProto: executable_build_options with one replica and one partition.
  compile.client = client.client, compile.program = &code;
  compile.compile_options = "\x1a\x04\x20\x01\x28\x01", compile.compile_options_size = 6;
  PJRT(Client_Compile, compile);

  const float x[] = {-2, -1, 0, 1, 2};
  const int64_t shape[] = {5};
  PJRT_Client_AddressableDevices_Args devices{};
  devices.client = client.client;
  PJRT(Client_AddressableDevices, devices);
  PJRT_Client_BufferFromHostBuffer_Args from{};
  from.client = client.client, from.device = devices.addressable_devices[0];
  from.data = x, from.type = PJRT_Buffer_Type_F32, from.dims = shape, from.num_dims = 1;
  from.host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
  PJRT(Client_BufferFromHostBuffer, from);

  PJRT_Buffer *const inputs[] = {from.buffer}, *const *const input_lists[] = {inputs};
  PJRT_Buffer *outputs[1], **const output_lists[] = {outputs};
  PJRT_ExecuteOptions options{};
  options.struct_size = sizeof options;
  PJRT_LoadedExecutable_Execute_Args execute{};
  execute.executable = compile.executable, execute.options = &options;
  execute.argument_lists = input_lists, execute.output_lists = output_lists;
  execute.num_devices = execute.num_args = 1;
  PJRT(LoadedExecutable_Execute, execute);

  float y[5];
  PJRT_Buffer_ToHostBuffer_Args to{};
  to.src = outputs[0], to.dst = y, to.dst_size = sizeof y;
  PJRT(Buffer_ToHostBuffer, to);
  PJRT_Event_Await_Args await{};
  await.event = to.event;
  PJRT(Event_Await, await);
  std::printf("%.4f %.4f %.4f %.4f %.4f\n", y[0], y[1], y[2], y[3], y[4]);
}
