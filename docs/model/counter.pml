/* Device-resident counter: a captured graph is replayed with frozen arguments, so n must live in device memory.
 *
 * CORES cores run a kernel together; KERNELS replays follow each other in stream order. Odd kernels are dispatches, even ones
 * combines of the dispatch just before. Every core works out n (or h) at its own time.
 *
 *   default    each core has a copy of the counter and advances its own
 *   ONE_WORD   one counter: all cores read it, then core 0 advances it, then all may go on
 *   ABORTS     a core may leave a dispatch early (bad input, time-out); all do or none, as the record decides
 *
 * Claims: every core of the same kernel works on the same n, the number of dispatches so far; combine's h is that of its
 * dispatch.
 *
 * Faults
 *   FAULT_NO_SYNC       one counter, advanced while a core may not have read it
 *   FAULT_ABORT_STAYS   the early way out doesn't advance
 *   FAULT_ONE_CORE_STAYS  the same on one core only
 *   FAULT_FROZEN        combine takes h from a kernel argument, which a replay doesn't renew
 *   FAULT_REREAD        combine reads n instead of the h that its dispatch left, and works ahead of a dispatch in between
 */
#ifndef CORES
#define CORES 2
#endif
#ifndef KERNELS
#define KERNELS 6
#endif
#if defined(ONE_WORD) || defined(FAULT_NO_SYNC)
#define COUNTER(core) counter[0]
#else
#define COUNTER(core) counter[core]
#endif
