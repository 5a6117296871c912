// The kernels that were compiled, by name.
#pragma once
#include <string_view>

#include "machine.hpp"

struct Kernel {
    const char* name;
    void (*body)(const void* params);
    machine::u8* (*shared)();
    machine::u32 (*shared_bytes)(const void* params);
    machine::u32 threads;
    const Kernel* next;

    static inline const Kernel* all = nullptr;

    Kernel(const char* name, void (*body)(const void*), machine::u8* (*shared)(),
           machine::u32 (*shared_bytes)(const void*), machine::u32 threads)
        : name(name), body(body), shared(shared), shared_bytes(shared_bytes), threads(threads), next(all) {
        all = this;
    }

    static const Kernel* find(std::string_view name) {
        const Kernel* kernel = all;
        while (kernel != nullptr && name != kernel->name) kernel = kernel->next;
        return kernel;
    }
};
