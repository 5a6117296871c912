// Calls of ThreadSanitizer; empty functions without it. The machine itself is compiled without instrumentation, so that
// the order in which it runs lanes does not count as an order of the kernels' accesses.
#pragma once

namespace tsan {

#ifdef THREAD_SANITIZER
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_set_fiber_name(void* fiber, const char* name);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read8(void* address);
void __tsan_write8(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
void __tsan_func_entry(void* caller);
void __tsan_func_exit();
}

constexpr unsigned NO_ORDER = 1;

inline void* current() { return __tsan_get_current_fiber(); }
inline void* create(const char* name) {
    void* fiber = __tsan_create_fiber(0);
    __tsan_set_fiber_name(fiber, name);
    return fiber;
}
inline void become(void* fiber) { __tsan_switch_to_fiber(fiber, NO_ORDER); }
inline void acquire(const void* address) { __tsan_acquire(const_cast<void*>(address)); }
inline void release(const void* address) { __tsan_release(const_cast<void*>(address)); }
inline void reads_word(const void* address) { __tsan_read8(const_cast<void*>(address)); }
inline void writes_word(void* address) { __tsan_write8(address); }
inline void reads(const void* address, unsigned long bytes) { __tsan_read_range(const_cast<void*>(address), bytes); }
inline void writes(void* address, unsigned long bytes) { __tsan_write_range(address, bytes); }
inline void enter(const void* caller) { __tsan_func_entry(const_cast<void*>(caller)); }
inline void leave() { __tsan_func_exit(); }
#else
inline void* current() { return nullptr; }
inline void* create(const char*) { return nullptr; }
inline void become(void*) {}
inline void acquire(const void*) {}
inline void release(const void*) {}
inline void reads_word(const void*) {}
inline void writes_word(void*) {}
inline void reads(const void*, unsigned long) {}
inline void writes(void*, unsigned long) {}
inline void enter(const void*) {}
inline void leave() {}
#endif

// During its lifetime, the code runs as a different one of ThreadSanitizer's threads.
class As {
public:
    explicit As(void* fiber) : before(current()) { become(fiber); }
    ~As() { become(before); }
    As(const As&) = delete;
    As& operator=(const As&) = delete;

private:
    void* before;
};

}  // namespace tsan
