// Operators new and delete over malloc: the library links no C++ runtime library, so that one
// build runs on every distribution and a compiler that builds its runtime itself has less to do.
// Only `new (std::nothrow)` is there: what cannot be allocated is null, and nothing throws.
#include <stdlib.h>

#include <new>

const std::nothrow_t std::nothrow{};

void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return malloc(bytes ? bytes : 1);
}

void* operator new(size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  void* memory = nullptr;
  if (posix_memalign(&memory, static_cast<size_t>(alignment), bytes ? bytes : 1)) return nullptr;
  return memory;
}

void* operator new[](size_t bytes, const std::nothrow_t& tag) noexcept {
  return operator new(bytes, tag);
}

void* operator new[](size_t bytes, std::align_val_t alignment, const std::nothrow_t& tag) noexcept {
  return operator new(bytes, alignment, tag);
}

void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { free(memory); }
void operator delete[](void* memory) noexcept { free(memory); }
void operator delete[](void* memory, size_t) noexcept { free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { free(memory); }
