/* Bad input: a rank that can't make a call tells everyone instead of sending counts, and the group stays usable.
 *
 * Call n of a rank is good (a number of rows for the next rank) or bad. A bad one writes an ABORT record to every peer, and
 * nothing else, and raises at once. Others raise as soon as they see an ABORT, whether or not the other records are here. A
 * window that is too small is judged by every rank from the same records, so all raise. n is used up in each case.
 *
 * Drain: a rank that raised before it saw all records of n waits for the rest of them before it writes anything of n + 1.
 * Without it, record n + 1 may overwrite record n - 1 in a peer's window unread: both stand in slot (n + 1) mod NREC.
 *
 * Claims: all ranks raise or none; a call that doesn't raise reads the right rows; nobody hangs. A wait and its reads are one
 * step, as in exchange.pml.
 *
 * Parameters: R ranks (2 or 3), CALLS; GOOD_OR_BAD: a good call always has rows, and they fit.
 * Faults
 *   FAULT_SOME_PEERS     only the next rank is told, the others get counts
 *   FAULT_AFTER_RECORD   found out after the record with counts was sent
 *   FAULT_NO_DRAIN       the next call begins at once
 *   FAULT_NOT_USED_UP    the aborter gives its next call the same number
 *   FAULT_LOCAL_VERDICT  only the rank whose window is too small finds that out
 */
#ifndef R
#define R 2
#endif
#ifndef CALLS
#define CALLS 4
#endif
#define NREC 2
#define NX 2 /* slots of x, read by pull */

#define ABORT 3    /* a record's body: rows for the next rank, or this */
#define TOO_MANY 2 /* rows that don't fit its window */

#define REC(owner, n, source) (((owner) * NREC + (n) % NREC) * R + (source))
byte code[R * NREC * R], body[R * NREC * R], truth[R * NREC * R]; /* truth is a ghost: the call of the body */
byte x[R * NX];

/* Ghosts: what happened in call n anywhere. */
bool bad[CALLS + 2], raised[CALLS + 2], returned[CALLS + 2];

#define RECORD_OF(p, n) ((p) == me || code[REC(me, n, p)] == (n))
#define ABORT_OF(p, n) ((p) != me && code[REC(me, n, p)] == (n) && body[REC(me, n, p)] == ABORT)
#if R == 2
#define ALL_RECORDS(n) (RECORD_OF(0, n) && RECORD_OF(1, n))
#define ABORT_HERE(n) (ABORT_OF(0, n) || ABORT_OF(1, n))
#else
#define ALL_RECORDS(n) (RECORD_OF(0, n) && RECORD_OF(1, n) && RECORD_OF(2, n))
#define ABORT_HERE(n) (ABORT_OF(0, n) || ABORT_OF(1, n) || ABORT_OF(2, n))
#endif

#ifdef FAULT_NO_DRAIN
#define DRAINED true
#else
#define DRAINED (n == 0 || ALL_RECORDS(n)) /* true at once where the call before saw them all */
#endif

inline raise() {
  assert(!returned[n]);
  raised[n] = true
}

inline finish() {
  p = 0;
  fits = mine != TOO_MANY;
  do
  :: p < R ->
     if
     :: p == me
     :: p != me ->
        assert(truth[REC(me, n, p)] == n);
#ifdef FAULT_LOCAL_VERDICT
        fits = fits || (p + 1) % R != me;
#endif
        fits = fits && body[REC(me, n, p)] != TOO_MANY
     fi;
     p++
  :: else -> break
  od;
  if
  :: !fits -> raise()
  :: else ->
     assert(!bad[n] && !raised[n]);
     returned[n] = true;
     p = (me + R - 1) % R; /* the rank whose rows come here */
     assert(body[REC(me, n, p)] == 0 || x[p * NX + n % NX] == n)
  fi;
  p = 0; mine = 0; fits = false
}

proctype Rank(byte me) {
  byte n, mine, p;
  bool fits;
  do
  :: atomic {
       n < CALLS && DRAINED ->
       n++;
       if
       :: mine = 1; x[me * NX + n % NX] = n
#ifndef GOOD_OR_BAD
       :: mine = 0; x[me * NX + n % NX] = n
       :: mine = TOO_MANY; x[me * NX + n % NX] = n
#endif
       :: mine = ABORT; bad[n] = true
       fi
     };
     do
     :: atomic {
          p < R && p != me ->
#ifdef FAULT_SOME_PEERS
          body[REC(p, n, me)] = (mine == ABORT && p != (me + 1) % R -> 0 : mine);
#elif defined(FAULT_AFTER_RECORD)
          body[REC(p, n, me)] = (mine == ABORT -> 0 : mine);
#else
          body[REC(p, n, me)] = mine;
#endif
          truth[REC(p, n, me)] = n;
          code[REC(p, n, me)] = n;
          p++
        }
     :: atomic { p == me -> p++ }
     :: atomic { p == R -> p = 0; break }
     od;
     if
     :: atomic {
          mine == ABORT ->
          raise();
          mine = 0;
#ifdef FAULT_NOT_USED_UP
          n--
#endif
        }
     :: atomic { mine != ABORT && ABORT_HERE(n) -> raise(); mine = 0 }
     :: atomic { mine != ABORT && !ABORT_HERE(n) && ALL_RECORDS(n) -> finish() }
     fi
  :: atomic { n == CALLS -> break }
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
