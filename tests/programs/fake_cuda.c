// A driver of CUDA that runs nothing: it writes down what it is told to launch. A test loads it, under the driver's
// name, before a library asks for libcuda.so.1.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char report[1 << 20];
static int capability = 90, most_shared = 232448, multiprocessors = 132, failing, parameters;
static char contexts[8];
// As in a driver, each thread has a context and a mode of capture.
static _Thread_local int capture_mode, device;
static _Thread_local void *current;

// A whole line at a time: several threads call.
static void say(const char *line) {
  static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&writing);
  strncat(report, line, sizeof report - strlen(report) - 1);
  pthread_mutex_unlock(&writing);
}

// The functions for tests.
const char *fake_report(void) { return report; }
void fake_reset(void) { report[0] = 0; }
void fake_gpu(int its_capability, int shared) { capability = its_capability, most_shared = shared; }
void fake_multiprocessors(int n) { multiprocessors = n; }
void fake_fails(int error) { failing = error; }
void fake_parameters(int n) { parameters = n; }  // of the next launches
void fake_device(int index) { device = index, current = index < 0 ? NULL : &contexts[index]; }

int cuInit(unsigned flags) { return 0; }
int cuCtxGetCurrent(void **context) { return *context = current, 0; }
int cuCtxSetCurrent(void *context) {
  current = context, device = (int)((char *)context - contexts);
  say("set-current\n");
  return 0;
}
int cuCtxGetDevice(int *index) { return *index = device, 0; }
int cuStreamGetCtx(void *stream, void **context) { return *context = &contexts[(long)stream % 8], 0; }
int cuDevicePrimaryCtxRetain(void **context, int index) { return *context = &contexts[index], 0; }
int cuDeviceGetAttribute(int *value, int which, int index) {
  *value = which == 75   ? capability / 10
           : which == 76 ? capability % 10
           : which == 97 ? most_shared
           : which == 16 ? multiprocessors
                         : -1;
  return 0;
}
int cuDeviceGetName(char *name, int n, int index) { return snprintf(name, n, "Fake %d", index), 0; }

struct module {
  unsigned code;
};
int cuModuleLoadData(void **module, const void *image) {
  const unsigned char *elf = image;
  if (memcmp(elf, "\177ELF", 4)) return 200;
  unsigned flags;
  memcpy(&flags, elf + 48, 4);
  struct module *made = malloc(sizeof *made);
  made->code = flags;
  char line[128];
  snprintf(line, sizeof line, "load device=%d mode=%d\n", device, capture_mode);
  say(line);
  return *module = made, failing;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = strdup(name);
  return 0;
}
int cuFuncSetAttribute(void *function, int which, int value) {
  char line[128];
  snprintf(line, sizeof line, "attribute %s %d=%d\n", (char *)function, which, value);
  say(line);
  return 0;
}
int cuFuncSetCacheConfig(void *function, int which) { return 0; }
int cuMemsetD8Async(unsigned long long at, unsigned char value, size_t n, void *stream) {
  char line[128];
  snprintf(line, sizeof line, "fill %llu %d %zu stream=%lu\n", at, value, n, (unsigned long)stream);
  say(line);
  return 0;
}
static int launched(void *function, const unsigned *grid, unsigned threads, unsigned shared, void *stream,
                    void **values, const char *more) {
  char line[2048];
  snprintf(line, sizeof line, "launch %s grid=%u,%u,%u threads=%u shared=%u stream=%lu%s values=", (char *)function,
           grid[0], grid[1], grid[2], threads, shared, (unsigned long)stream, more);
  for (int i = 0; i < parameters; ++i)
    snprintf(line + strlen(line), sizeof line - strlen(line), "%s%llu", i ? "," : "", *(unsigned long long *)values[i]);
  strncat(line, "\n", sizeof line - strlen(line) - 1);
  say(line);
  return failing;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **values, void **extra) {
  const unsigned grid[3] = {x, y, z};
  return by == 1 && bz == 1 ? launched(function, grid, bx, shared, stream, values, "") : 1;
}
struct attribute {
  int id, unused;
  unsigned value[16];
};
struct configuration {
  unsigned grid[3], block[3], shared;
  void *stream;
  struct attribute *attributes;
  unsigned n;
};
int cuLaunchKernelEx(const struct configuration *config, void *function, void **values, void **extra) {
  char more[256] = "";
  for (unsigned i = 0; i < config->n; ++i)
    snprintf(more + strlen(more), sizeof more - strlen(more), " %d=%u", config->attributes[i].id,
             config->attributes[i].value[0]);
  return launched(function, config->grid, config->block[0], config->shared, config->stream, values, more);
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
  const int before = capture_mode;
  return capture_mode = *mode, *mode = before, 0;
}
int cuGetErrorString(int error, const char **text) { return *text = "a fake error", 0; }
