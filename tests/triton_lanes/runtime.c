/* What the kernels compiled by lower.py call: memory, copies, atomic order, delays.
 *
 * Every load and store of a tile is a call of lowered_copy or memrefCopy, so this file decides when a store becomes visible. With
 * weak_stores it does what a DMA queue may do: a store to memory that others see (lowered_shared) waits in the program's own queue
 * until the next fence and may leave it before in any order; stores to overlapping bytes keep theirs. A load of the same program sees
 * what the program has stored. So a flag with no barrier in front of it can overtake its payload, on x86 too.
 *
 * All state is a thread's own: a thread is one program of a launch.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <sched.h>

typedef struct Chunk { struct Chunk *next; size_t used, size; char bytes[]; } Chunk;
typedef struct Store { struct Store *next; char *to; size_t size; char bytes[]; } Store;
typedef struct { char *begin, *end; } Range;

enum { MAX_RANGES = 256 };
static Range ranges[MAX_RANGES];
static int num_ranges;

static __thread Chunk *arena;
static __thread Store *queue;
static __thread uint64_t state;
static __thread int weak_stores;
static __thread uint32_t delay_one_in, delay_max_us;
static __thread int64_t stores_deferred, stores_overtaken;

/* Memory that other programs and ranks see: windows, scratch, outputs. Called before the launch, by one thread. */
void lowered_shared(const int64_t *begin, const int64_t *size, int64_t count) {
  num_ranges = 0;
  for (int64_t i = 0; i < count && num_ranges < MAX_RANGES; i++)
    ranges[num_ranges++] = (Range){(char *)begin[i], (char *)begin[i] + size[i]};
}

static uint64_t draw(void) { /* xorshift64* (Vigna 2016) */
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * 0x2545F4914F6CDD1DULL;
}

static void leave(Store **at) {
  Store *store = *at;
  memcpy(store->to, store->bytes, store->size);
  *at = store->next;
  free(store);
}

static int overlap(const char *a, size_t na, const char *b, size_t nb) { return a < b + nb && b < a + na; }

/* Stores that overlap these bytes leave, oldest first. */
static void settle(const char *at, size_t size) {
  for (Store **p = &queue; *p;)
    if (overlap((*p)->to, (*p)->size, at, size)) leave(p);
    else p = &(*p)->next;
}

/* One store leaves, any whose bytes no older one waits to write. */
static void leave_one(void) {
  int index = 0;
  for (Store **p = &queue; *p; index++) {
    Store *store = *p;
    int blocked = 0;
    for (Store *older = queue; older != store; older = older->next)
      blocked |= overlap(older->to, older->size, store->to, store->size);
    if (!blocked && (draw() & 1)) {
      stores_overtaken += index > 0;
      leave(p);
      return;
    }
    p = &store->next;
  }
}

static void delay(void) {
  if (!delay_one_in || draw() % delay_one_in) return;
  if (queue) leave_one();
  uint32_t us = delay_max_us ? draw() % delay_max_us : 0;
  if (us < 3) sched_yield();
  else nanosleep(&(struct timespec){0, us * 1000L}, NULL);
}

static void leave_all(void) {
  while (queue) {
    leave_one();
    delay();
  }
}

void lowered_begin(uint64_t seed, int32_t weak, uint32_t one_in, uint32_t max_us) {
  state = seed * 0x9E3779B97F4A7C15ULL + 0x632BE59BD9B4E019ULL;
  if (!state) state = 1;
  weak_stores = weak;
  delay_one_in = one_in;
  delay_max_us = max_us;
  stores_deferred = stores_overtaken = 0;
}

void lowered_end(int64_t *counters) {
  leave_all();
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  for (Chunk *chunk = arena, *next; chunk; chunk = next) {
    next = chunk->next;
    free(chunk);
  }
  arena = NULL;
  counters[0] = stores_deferred;
  counters[1] = stores_overtaken;
}

/* The kernels never free: what a program allocates lives until its end. */
void *lowered_alloc(size_t size) {
  size = (size + 63) & ~(size_t)63;
  if (!arena || arena->used + size > arena->size) {
    size_t room = size > (1 << 20) ? size + 64 : (1 << 20);
    Chunk *chunk = malloc(sizeof(Chunk) + room);
    if (!chunk) abort();
    *chunk = (Chunk){arena, 0, room};
    arena = chunk;
  }
  char *at = arena->bytes + arena->used;
  arena->used += size;
  return at;
}
void lowered_free(void *at) { (void)at; }

void lowered_fence(void) {
  leave_all();
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  delay();
}

static int is_shared(const char *at) {
  for (int i = 0; i < num_ranges; i++)
    if (at >= ranges[i].begin && at < ranges[i].end) return 1;
  return 0;
}

void lowered_copy(char *to, const char *from, size_t size) {
  if (!size) return;
  if (is_shared(from)) {
    delay();
    if (queue) settle(from, size);
  }
  if (!is_shared(to)) {
    memcpy(to, from, size);
    return;
  }
  delay();
  if (!weak_stores) {
    memcpy(to, from, size);
    return;
  }
  Store *store = malloc(sizeof(Store) + size), **last = &queue;
  if (!store) abort();
  store->next = NULL;
  store->to = to;
  store->size = size;
  memcpy(store->bytes, from, size);
  while (*last) last = &(*last)->next;
  *last = store;
  stores_deferred++;
}

typedef struct { int64_t rank; void *descriptor; } Unranked; /* descriptor: allocated, aligned, offset, sizes[rank], strides[rank] */

void memrefCopy(int64_t item, Unranked *source, Unranked *target) {
  int64_t rank = source->rank, *s = source->descriptor, *t = target->descriptor, at[8] = {0};
  const int64_t *sizes = s + 3, *from_strides = s + 3 + rank, *to_strides = t + 3 + rank;
  const char *from = (char *)s[1] + s[2] * item;
  char *to = (char *)t[1] + t[2] * item;
  int64_t run = 1, inner = rank; /* the innermost dimensions that are contiguous in both go as one */
  while (inner > 0 && from_strides[inner - 1] == run && to_strides[inner - 1] == run) run *= sizes[--inner];
  if (!run) return;
  for (int64_t i = 0; i < inner; i++)
    if (!sizes[i]) return;
  for (;;) {
    int64_t from_at = 0, to_at = 0, i;
    for (i = 0; i < inner; i++) from_at += at[i] * from_strides[i], to_at += at[i] * to_strides[i];
    lowered_copy(to + to_at * item, from + from_at * item, run * item);
    for (i = inner - 1; i >= 0 && ++at[i] == sizes[i]; i--) at[i] = 0;
    if (i < 0) return;
  }
}

/* float32 -> bfloat16, to nearest even; the bits come back where a _Float16 does. */
_Float16 __truncsfbf2(float value) {
  uint32_t bits;
  uint16_t half;
  _Float16 result;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) half = (bits >> 16) | 0x40;
  else half = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  memcpy(&result, &half, 2);
  return result;
}
