// A library that stands in for the CUDA driver, to test calls of it on machines without one. It
// prints the arguments of each call.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace {

void* const kContext = reinterpret_cast<void*>(0xC0);
void* const kModule = reinterpret_cast<void*>(0xD0);
void* const kFunction = reinterpret_cast<void*>(0xF0);

void print(const char* name, const uint64_t* numbers, int count) {
    std::printf(" %s=", name);
    for (int n = 0; n < count; ++n)
        std::printf("%s%llu", n ? "," : "", (unsigned long long)numbers[n]);
}

void print(const char* name, const uint32_t* numbers, int count) {
    std::printf(" %s=", name);
    for (int n = 0; n < count; ++n) std::printf("%s%u", n ? "," : "", numbers[n]);
}

}  // namespace

extern "C" {

int cuInit(unsigned flags) { return std::printf("init %u\n", flags), 0; }

int cuDriverGetVersion(int* version) { return *version = 13000, 0; }

int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }

int cuDevicePrimaryCtxRetain(void** context, int device) {
    std::printf("retain %d\n", device);
    return *context = kContext, 0;
}

int cuCtxSetCurrent(void* context) {
    std::printf("current %p\n", context);
    return 0;
}

int cuModuleLoadData(void** module, const void* image) {
    std::printf("module %.5s\n", static_cast<const char*>(image));
    return *module = kModule, 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
    std::printf("function %p %s\n", module, name);
    // 500: CUDA_ERROR_NOT_FOUND
    return *function = kFunction, std::strcmp(name, "missing") == 0 ? 500 : 0;
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
    std::printf("attribute %p %d %d\n", function, attribute, value);
    return 0;
}

int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box,
                           const uint32_t* element_strides, int interleave, int swizzle,
                           int promotion, int fill) {
    if (reinterpret_cast<uintptr_t>(map) % 64) return 1;  // CUDA_ERROR_INVALID_VALUE
    std::printf("map type=%d rank=%u address=%p", type, rank, address);
    print("sizes", sizes, rank);
    print("strides", strides, rank - 1);
    print("box", box, rank);
    print("element_strides", element_strides, rank);
    std::printf(" options=%d,%d,%d,%d\n", interleave, swizzle, promotion, fill);
    for (int n = 0; n < 128; ++n) static_cast<uint8_t*>(map)[n] = static_cast<uint8_t>(n);
    return 0;
}

int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void* stream,
                   void** parameters, void** extra) {
    std::printf("launch %p grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%p %s extra=%p\n",
                function, x, y, z, block_x, block_y, block_z, shared, stream,
                static_cast<const char*>(parameters[0]), static_cast<void*>(extra));
    return 0;
}

int cuGetProcAddress_v2(const char* symbol, void** function, int, uint64_t, int* status) {
    *function = dlsym(RTLD_DEFAULT, (std::string(symbol) + "_v2").c_str());
    if (*function == nullptr) *function = dlsym(RTLD_DEFAULT, symbol);
    if (status != nullptr) *status = *function == nullptr;
    return *function == nullptr ? 500 : 0;
}
}
