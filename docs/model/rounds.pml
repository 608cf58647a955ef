/* Record rounds: how far may a rank run ahead of its peers?
 *
 * Every call n is announced by one record to every peer. A rank has *consumed* call n when it has waited for the records of
 * all peers. A synchronous dispatch publishes n and consumes it at once; an asynchronous one consumes it some time later, in
 * any order among those under way. Each rank chooses freely here, call by call, so all mixtures of both are covered.
 *
 * Rule: record n is published only after call n - A has been consumed here. Claim: NREC = 2 A record slots are enough. A
 * peer's record n - A, which this rank has consumed, says that the peer has consumed n - 2 A, the last user of n's slot.
 *
 * Parameters: R ranks, A calls published and not consumed, NREC record slots, CALLS calls, V codes (0: never wraps).
 * Faults: FAULT_GE, FAULT_SLOT_FROM_CODE, FAULT_CODE_FIRST, FAULT_ZERO_OMITTED, FAULT_ZERO_ASSUMED; NREC or V chosen too small.
 */
#ifndef R
#define R 2
#endif
#ifndef A
#define A 1 /* up to 3 */
#endif
#ifndef NREC
#define NREC (2 * A)
#endif
#ifndef CALLS
#define CALLS 7
#endif
#ifndef V
#define V 0
#endif

#if V == 0
#define CODE(n) (n)
#else
#define CODE(n) (((n) - 1) % V + 1)
#endif
#ifdef FAULT_SLOT_FROM_CODE
#define SLOT(n) (CODE(n) % NREC)
#else
#define SLOT(n) ((n) % NREC)
#endif
#ifdef FAULT_GE
#define HERE(word, n) ((word) >= CODE(n))
#else
#define HERE(word, n) ((word) == CODE(n))
#endif

/* Record of `source` in the window of `owner`. */
#define REC(owner, slot, source) (((owner) * NREC + (slot)) * R + (source))
byte code[R * NREC * R];
byte rows[R * NREC * R];  /* the body: rows that source sends to owner, 0 or 1 */
byte truth[R * NREC * R]; /* ghost: the call that the body really belongs to */
#ifdef FAULT_ZERO_ASSUMED
byte assumed[R * R]; /* ghost: last call in which owner took silence of source for "no rows" */
#endif

#define TO_PEER(p) ((p) < R && (p) != me)
#define NEXT(p)                                                                                                                \
  p++;                                                                                                                         \
  if                                                                                                                           \
  :: p == me -> p++                                                                                                            \
  :: else                                                                                                                      \
  fi

proctype Rank(byte me) {
  byte published, first, n, p, count; /* first: oldest call that isn't consumed */
  bool open[A + 1];                   /* open[n % (A + 1)]: n is published and not consumed */
  bool sends;
  first = 1;
  do
  :: atomic { /* publish; the rule */
       published < CALLS && published + 1 - first < A ->
       published++;
       open[published % (A + 1)] = true;
       if
       :: sends = false
       :: sends = true
       fi;
       p = (me == 0 -> 1 : 0)
     };
     do /* body, then code; one peer after the other */
     :: atomic {
          TO_PEER(p) ->
#ifdef FAULT_CODE_FIRST
          code[REC(p, SLOT(published), me)] = CODE(published)
#else
          rows[REC(p, SLOT(published), me)] = sends;
          truth[REC(p, SLOT(published), me)] = published
#endif
        };
        atomic {
#ifdef FAULT_CODE_FIRST
          rows[REC(p, SLOT(published), me)] = sends;
          truth[REC(p, SLOT(published), me)] = published;
#else
#ifdef FAULT_ZERO_ASSUMED
          assert(!sends || assumed[p * R + me] < published);
#endif
#if defined(FAULT_ZERO_OMITTED) || defined(FAULT_ZERO_ASSUMED)
          if
          :: sends -> code[REC(p, SLOT(published), me)] = CODE(published)
          :: else
          fi;
#else
          code[REC(p, SLOT(published), me)] = CODE(published);
#endif
#endif
          NEXT(p)
        }
     :: atomic { !TO_PEER(p) -> p = 0; sends = false; break }
     od
  :: atomic { /* consume any call under way; from here on this rank only waits for it */
       first <= published ->
       if
       :: n = first
#if A > 1
       :: first < published && open[(first + 1) % (A + 1)] -> n = first + 1
#endif
#if A > 2
       :: first + 1 < published && open[(first + 2) % (A + 1)] -> n = first + 2
#endif
       fi;
       p = (me == 0 -> 1 : 0)
     };
     do
     :: atomic { TO_PEER(p) && HERE(code[REC(me, SLOT(n), p)], n) -> count = 1 }; /* seen; the body is read later */
        atomic {
          assert(truth[REC(me, SLOT(n), p)] == n);
          count = 0;
          NEXT(p)
        }
#ifdef FAULT_ZERO_ASSUMED
     :: atomic { TO_PEER(p) && !HERE(code[REC(me, SLOT(n), p)], n) -> assumed[me * R + p] = n; NEXT(p) }
#endif
     :: atomic { !TO_PEER(p) -> p = 0; open[n % (A + 1)] = false; n = 0; break }
     od;
     atomic {
       do
       :: first <= published && !open[first % (A + 1)] -> first++
       :: else -> break
       od
     }
  :: atomic { published == CALLS && first > published -> break }
  od
}

init {
  byte i;
  atomic {
    do
    :: i < R -> run Rank(i); i++
    :: i == R -> break
    od
  }
}
