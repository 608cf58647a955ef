#include "pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace moe_a2a {
namespace {

constexpr size_t HUGE_BLOCK = size_t{2} << 20;
constexpr size_t SMALL_LIMIT = size_t{1} << 20;  // from here on blocks are mapped
constexpr size_t HEADER = 64;

struct Header {
  size_t size;  // of the whole block, header included
};

// Sizes are rounded so that blocks fit again: to powers of two below 1 MB, to an eighth of the power of two above (never less
// than a huge page), so at most an eighth is wasted on large ones.
size_t block_size(size_t bytes) {
  if (bytes > (size_t{1} << 60)) throw std::bad_alloc();
  const size_t need = bytes + HEADER;
  size_t power = 256;
  while (power < need) power <<= 1;
  if (power <= SMALL_LIMIT) return power;
  const size_t step = power / 16 > HUGE_BLOCK ? power / 16 : HUGE_BLOCK;
  return (need + step - 1) / step * step;
}

size_t keep_limit() {
  static const size_t limit = [] {
    const char* wish = std::getenv("MOE_A2A_POOL_BYTES");
    return wish != nullptr ? static_cast<size_t>(std::strtoull(wish, nullptr, 10)) : size_t{2} << 30;
  }();
  return limit;
}

// Blocks of one size that wait for reuse.
struct Bin {
  std::vector<void*> blocks;
  uint64_t used = 0;  // when one was last taken or given back, in takes and gives
};

struct Pool {
  std::mutex mutex;
  std::map<size_t, Bin> kept;
  uint64_t clock = 0;
  PoolStats stats{};
};

std::atomic<int> fill{-1};

// Never destroyed: tensors may outlive static destructors.
Pool& pool() {
  static Pool* instance = [] {
    auto* made = new Pool;
    // A fork must not inherit a locked pool.
    pthread_atfork([] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); }, [] { pool().mutex.unlock(); });
    return made;
  }();
  return *instance;
}

void* map_block(size_t size) {
  if (size <= SMALL_LIMIT) {
    void* block = std::aligned_alloc(HEADER, size);
    if (block == nullptr) throw std::bad_alloc();
    return block;
  }
  // Over-reserve, cut to a huge-page boundary.
  const size_t reserve = size + HUGE_BLOCK;
  void* raw = mmap(nullptr, reserve, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  char* start = static_cast<char*>(raw);
  char* aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + HUGE_BLOCK - 1) / HUGE_BLOCK * HUGE_BLOCK);
  if (aligned > start) munmap(start, static_cast<size_t>(aligned - start));
  char* end = aligned + size;
  if (end < start + reserve) munmap(end, static_cast<size_t>(start + reserve - end));
  madvise(aligned, size, MADV_HUGEPAGE);  // a wish: without huge pages the block works all the same
  return aligned;
}

void unmap_block(void* block, size_t size) {
  if (size <= SMALL_LIMIT) {
    std::free(block);
  } else {
    munmap(block, size);
  }
}

}  // namespace

void* pool_take(size_t bytes) {
  const size_t size = block_size(bytes);
  Pool& p = pool();
  void* block = nullptr;
  {
    std::lock_guard lock(p.mutex);
    const auto found = p.kept.find(size);
    if (found != p.kept.end()) found->second.used = ++p.clock;
    if (found != p.kept.end() && !found->second.blocks.empty()) {
      block = found->second.blocks.back();
      found->second.blocks.pop_back();
      p.stats.kept_bytes -= size;
      ++p.stats.reused;
    }
    p.stats.held_bytes += size;
    ++p.stats.takes;
  }
  if (block == nullptr) {
    try {
      block = map_block(size);
    } catch (const std::bad_alloc&) {
      // What is kept for later may be what is missing now.
      pool_trim();
      try {
        block = map_block(size);
      } catch (...) {
        std::lock_guard lock(p.mutex);
        p.stats.held_bytes -= size;
        throw;
      }
    } catch (...) {
      std::lock_guard lock(p.mutex);
      p.stats.held_bytes -= size;
      throw;
    }
  }
  static_cast<Header*>(block)->size = size;
  char* data = static_cast<char*>(block) + HEADER;
  const int byte = fill.load(std::memory_order_relaxed);
  if (byte >= 0) std::memset(data, byte, size - HEADER);
  return data;
}

void pool_fill(int byte) { fill = byte; }

void pool_give(void* data) {
  void* block = static_cast<char*>(data) - HEADER;
  const size_t size = static_cast<Header*>(block)->size;
  Pool& p = pool();
  std::vector<std::pair<void*, size_t>> gone;
  {
    std::lock_guard lock(p.mutex);
    p.stats.held_bytes -= size;
    // What is full of sizes that nobody asks for any more would be of no use: they make room, the longest unused first.
    while (size <= keep_limit() && p.stats.kept_bytes + size > keep_limit()) {
      auto oldest = p.kept.end();
      for (auto bin = p.kept.begin(); bin != p.kept.end(); ++bin)
        if (bin->first != size && !bin->second.blocks.empty() &&
            (oldest == p.kept.end() || bin->second.used < oldest->second.used))
          oldest = bin;
      if (oldest == p.kept.end()) break;
      gone.emplace_back(oldest->second.blocks.back(), oldest->first);
      oldest->second.blocks.pop_back();
      p.stats.kept_bytes -= oldest->first;
    }
    if (p.stats.kept_bytes + size <= keep_limit()) {
      Bin& bin = p.kept[size];
      bin.used = ++p.clock;
      bin.blocks.push_back(block);
      p.stats.kept_bytes += size;
    } else {
      gone.emplace_back(block, size);
    }
  }
  for (const auto& [old, bytes] : gone) unmap_block(old, bytes);
}

size_t pool_trim() {
  Pool& p = pool();
  std::map<size_t, Bin> kept;
  size_t freed = 0;
  {
    std::lock_guard lock(p.mutex);
    kept.swap(p.kept);
    freed = p.stats.kept_bytes;
    p.stats.kept_bytes = 0;
  }
  for (auto& [size, bin] : kept)
    for (void* block : bin.blocks) unmap_block(block, size);
  return freed;
}

int64_t free_memory() {
  // MemAvailable is what can be had without swapping; where it can't be read nobody is refused.
  int64_t kilobytes = -1;
  if (std::FILE* file = std::fopen("/proc/meminfo", "re")) {
    char line[128];
    while (kilobytes < 0 && std::fgets(line, sizeof line, file) != nullptr) {
      long value = 0;
      if (std::sscanf(line, "MemAvailable: %ld", &value) == 1) kilobytes = value;
    }
    std::fclose(file);
  }
  return kilobytes < 0 ? std::numeric_limits<int64_t>::max() : kilobytes * 1024;
}

PoolStats pool_stats() {
  Pool& p = pool();
  std::lock_guard lock(p.mutex);
  return p.stats;
}

}  // namespace moe_a2a
