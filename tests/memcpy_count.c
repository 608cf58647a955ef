// Counts, from outside of the product, the bytes that go through memcpy in multiples of a row: preloaded into a rank by
// tests/test_window_bytes.py, so that a copy the product doesn't count is seen all the same.
#include <stddef.h>
#include <string.h>

static size_t row_bytes, total;

void watch_rows_of(size_t bytes) {
  __atomic_store_n(&row_bytes, bytes, __ATOMIC_RELAXED);
  __atomic_store_n(&total, 0, __ATOMIC_RELAXED);
}

size_t bytes_in_rows(void) { return __atomic_load_n(&total, __ATOMIC_RELAXED); }

void* memcpy(void* restrict to, const void* restrict from, size_t bytes) {
  const size_t row = __atomic_load_n(&row_bytes, __ATOMIC_RELAXED);
  if (row != 0 && bytes != 0 && bytes % row == 0) __atomic_fetch_add(&total, bytes, __ATOMIC_RELAXED);
  return memmove(to, from, bytes);
}
