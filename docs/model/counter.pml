/* Device-resident counter: a captured graph is replayed with frozen arguments, so n lives in device memory.
 *
 * The graph is dispatch into buffer 0, dispatch into buffer 1, combine of buffer 0, combine of buffer 1; it is replayed.
 * Kernels follow each other in stream order: one begins when the one before has ended on all cores. Within a kernel the cores
 * run freely. A dispatch takes n from the counter, advances it on every way out, and leaves n in its buffer, where the combine
 * finds its h. A dispatch may be aborted, on all cores alike as the records say: n is used up, the buffer holds no handle.
 *
 * Each core has a copy of the counter and advances its own; or (ONE_WORD) there is one counter, which core 0 advances when all
 * cores have read it.
 *
 * Claims: all cores of a dispatch work on its number; all cores of a combine work on the handle of its dispatch.
 *
 * Parameters: CORES, REPLAYS; ONE_WORD, ABORTS.
 * Faults
 *   FAULT_NO_SYNC      with ONE_WORD, the counter is advanced although a core may not have read it
 *   FAULT_ABORT_STAYS  an aborted dispatch doesn't advance the counter
 *   FAULT_FROZEN       combine takes h from its arguments, which are those of the first replay
 *   FAULT_LATEST       combine takes the counter for its h
 */
#ifndef CORES
#define CORES 2
#endif
#ifndef REPLAYS
#define REPLAYS 2
#endif
#define KERNELS (4 * REPLAYS)
#define IS_DISPATCH(k) ((k) % 4 < 2)
#define BUFFER(k) ((k) % 2)
#define MAY_BEGIN(k) ((k) < KERNELS && ((k) == 0 || ended[(k) - 1] == CORES))

#ifdef ONE_WORD
#define COUNTER(core) counter[0]
#else
#define COUNTER(core) counter[core]
#endif

byte counter[CORES]; /* dispatches so far */
byte handle[2 * CORES]; /* [buffer][core]: n of its dispatch, 0 none */
byte readers;
byte ended[KERNELS]; /* cores that are through */

/* Ghosts: what is true of kernel k. */
byte number[KERNELS];  /* n of a dispatch, counted where its first core begins */
byte expected[2];      /* handle in a buffer */
byte dispatches;
bool aborted[KERNELS];
#ifdef FAULT_FROZEN
byte argument[2];
#endif

proctype Core(byte me) {
  byte k, n;
  do
  :: atomic {
       MAY_BEGIN(k) && IS_DISPATCH(k) ->
       if
       :: number[k] == 0 ->
          dispatches++;
          number[k] = dispatches;
          expected[BUFFER(k)] = dispatches;
#ifdef ABORTS
          if
          :: true
          :: aborted[k] = true; expected[BUFFER(k)] = 0
          fi
#endif
       :: else
       fi
     };
     atomic { n = COUNTER(me) + 1; readers++; assert(n == number[k]) };
     handle[BUFFER(k) * CORES + me] = (aborted[k] -> 0 : n);
#ifdef FAULT_FROZEN
     atomic {
       if
       :: k < 2 -> argument[BUFFER(k)] = n
       :: else
       fi
     };
#endif
#ifdef FAULT_ABORT_STAYS
     if
     :: aborted[k] -> goto out
     :: else
     fi;
#endif
#ifdef ONE_WORD
     if
     :: me > 0
#ifdef FAULT_NO_SYNC
     :: me == 0 -> counter[0] = n
#else
     :: atomic { me == 0 && readers == CORES -> counter[0] = n }
#endif
     fi;
#else
     counter[me] = n;
#endif
out:
     atomic {
       n = 0;
       ended[k]++;
       if
       :: ended[k] == CORES -> readers = 0
       :: else
       fi;
       k++
     }
  :: atomic {
       MAY_BEGIN(k) && !IS_DISPATCH(k) ->
#if defined(FAULT_FROZEN)
       n = argument[BUFFER(k)];
#elif defined(FAULT_LATEST)
       n = COUNTER(me);
#else
       n = handle[BUFFER(k) * CORES + me];
#endif
       assert(n == expected[BUFFER(k)]);
       n = 0;
       ended[k]++;
       k++
     }
  :: atomic { k == KERNELS -> break }
  od
}

init {
  byte i;
  atomic {
    do
    :: i < CORES -> run Core(i); i++
    :: i == CORES -> break
    od
  }
}
