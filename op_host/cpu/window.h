// Maps a window's memory: on a huge-page boundary, with every page there, in huge pages where the kernel gives them.
#pragma once

#include <cstdint>

namespace moe_a2a {

struct MapResult {
  char* address;   // null on failure
  int error;       // errno of the step that failed, 0
  bool populated;  // every page is there (Linux 5.14); otherwise pages were touched one by one
  bool collapsed;  // the kernel put the pages into huge ones (Linux 6.1); check ShmemPmdMapped before believing it
};

// fd: a memfd of `bytes`, a multiple of 2 MB. `fill`: this is the owner's mapping, whose pages don't exist yet. `populate` false
// goes without MADV_POPULATE_*, as on a kernel that has none (tests).
MapResult map_window(int fd, int64_t bytes, bool fill, bool populate = true);

}  // namespace moe_a2a
