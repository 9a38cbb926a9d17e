// Sums the time of every GPU kernel and copy of a process by name, through CUPTI, and prints the sums at exit.
//
// Loaded by the CUDA driver: CUDA_INJECTION64_PATH=libkernels.so KERNELS_OUT=kernels.tsv program …
// Built by kernels.sh, which finds the record type RECORD of the installed CUPTI.
#include <cupti.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BUFFER = 8 << 20, NAMES = 1 << 16 };

typedef struct {
  char *name;
  uint64_t calls, nanoseconds;
} Sum;

static Sum sums[NAMES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add(const char *name, uint64_t nanoseconds) {
  uint64_t hash = 1469598103934665603u;
  for (const char *c = name; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211u;
  for (size_t i = hash % NAMES;; i = (i + 1) % NAMES) {
    if (!sums[i].name) sums[i].name = strdup(name);
    if (strcmp(sums[i].name, name)) continue;
    sums[i].calls++;
    sums[i].nanoseconds += nanoseconds;
    return;
  }
}

static void CUPTIAPI requested(uint8_t **buffer, size_t *size, size_t *most) {
  *buffer = aligned_alloc(8, BUFFER);
  *size = *buffer ? BUFFER : 0;
  *most = 0;
}

static void CUPTIAPI completed(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
  (void)context, (void)stream, (void)size;
  CUpti_Activity *record = NULL;
  pthread_mutex_lock(&lock);
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const RECORD *kernel = (const RECORD *)record;
      add(kernel->name ? kernel->name : "unnamed", kernel->end - kernel->start);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const CUpti_ActivityMemcpy5 *copy = (const CUpti_ActivityMemcpy5 *)record;
      add(copy->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOD ? "copy, device to device" : "copy, host", copy->end - copy->start);
    }
  }
  pthread_mutex_unlock(&lock);
  free(buffer);
}

static void finish(void) {
  cuptiActivityFlushAll(1);
  const char *path = getenv("KERNELS_OUT");
  FILE *out = path ? fopen(path, "w") : stderr;
  if (!out) return;
  for (size_t i = 0; i < NAMES; i++) {
    if (sums[i].name) fprintf(out, "%llu\t%llu\t%s\n", (unsigned long long)sums[i].nanoseconds, (unsigned long long)sums[i].calls, sums[i].name);
  }
  if (path) fclose(out);
}

int InitializeInjection(void) {
  cuptiActivityRegisterCallbacks(requested, completed);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
  atexit(finish);
  return 1;
}
