// Counts the memory that a process requests from malloc, when it is preloaded. Small blocks are not
// counted: the interpreter's differ from run to run, and the kernels' are large.
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

enum { SMALLEST = 1 << 14, BLOCKS = 1 << 16 };

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);
extern void __libc_free(void*);

static struct Block {
    char* data;
    size_t bytes;
} blocks[BLOCKS];
static size_t held, peak;
static atomic_flag locked = ATOMIC_FLAG_INIT;

static void lock(void) {
    while (atomic_flag_test_and_set(&locked)) {
    }
}

static void unlock(void) { atomic_flag_clear(&locked); }

static void* added(void* data, size_t bytes) {
    if (!data || bytes < SMALLEST) return data;
    lock();
    int i = 0;
    while (blocks[i].data) {
        if (++i == BLOCKS) abort();
    }
    blocks[i] = (struct Block){data, bytes};
    held += bytes;
    if (held > peak) peak = held;
    unlock();
    return data;
}

static void removed(void* data) {
    if (!data || malloc_usable_size(data) < SMALLEST) return;
    lock();
    for (int i = 0; i < BLOCKS; ++i) {
        if (blocks[i].data != data) continue;
        held -= blocks[i].bytes;
        blocks[i].data = NULL;
        break;
    }
    unlock();
}

void* malloc(size_t bytes) { return added(__libc_malloc(bytes), bytes); }

void* calloc(size_t count, size_t bytes) {
    return added(__libc_calloc(count, bytes), count * bytes);
}

void* realloc(void* data, size_t bytes) {
    removed(data);
    return added(__libc_realloc(data, bytes), bytes);
}

void* memalign(size_t alignment, size_t bytes) {
    return added(__libc_memalign(alignment, bytes), bytes);
}

void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void** data, size_t alignment, size_t bytes) {
    *data = memalign(alignment, bytes);
    return *data ? 0 : ENOMEM;
}

void free(void* data) {
    removed(data);
    __libc_free(data);
}

size_t allocated_bytes(void) { return held; }
size_t peak_of_allocated_bytes(void) { return peak; }
void reset_peak_of_allocated_bytes(void) { peak = held; }
