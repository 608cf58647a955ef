#include "window.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

// Newer than some headers this has to build with.
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace moe_a2a {

MapResult map_window(int fd, int64_t bytes, bool fill, bool populate) {
  constexpr size_t HUGE = size_t{2} << 20;
  const auto size = static_cast<size_t>(bytes);
  // MADV_COLLAPSE answers EINVAL on a mapping that isn't aligned: reserve more, map in the middle of it.
  void* raw = mmap(nullptr, size + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return {nullptr, errno, false, false};
  char* start = static_cast<char*>(raw);
  char* aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + HUGE - 1) / HUGE * HUGE);
  if (mmap(aligned, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    munmap(raw, size + HUGE);
    return {nullptr, error, false, false};
  }
  if (aligned > start) munmap(start, static_cast<size_t>(aligned - start));
  char* end = aligned + size;
  if (end < start + size + HUGE) munmap(end, static_cast<size_t>(start + size + HUGE - end));

  MapResult result{aligned, 0, true, false};
  // First touch costs ten to twenty times a later one; it is paid here, not in the first call.
  if (!populate || madvise(aligned, size, fill ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) != 0) {
    result.populated = false;
    const long page = sysconf(_SC_PAGESIZE);
    for (size_t at = 0; at < size; at += static_cast<size_t>(page)) {
      volatile char* touch = aligned + at;
      const char there = *touch;  // the header is written already
      if (fill) *touch = there;
    }
  }
  // Pages first, then huge pages: on an empty memfd MADV_COLLAPSE answers EINVAL.
  result.collapsed = madvise(aligned, size, MADV_COLLAPSE) == 0;
  return result;
}

}  // namespace moe_a2a
