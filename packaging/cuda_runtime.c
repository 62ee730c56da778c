/* Prints the version of the CUDA runtime in a library: 12090 is 12.9. For the audit of a library for another machine, under
   an emulator (aotops/fatbin.py).

       cuda_runtime libaotops.so */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv) {
  void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
  int (*version)(void);
  if (!library) return fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "usage: cuda_runtime libaotops.so"), 2;
  *(void **)&version = dlsym(library, "aot_cuda_runtime");
  if (!version) return fprintf(stderr, "%s\n", dlerror()), 1;
  return printf("%d\n", version()) < 0;
}
