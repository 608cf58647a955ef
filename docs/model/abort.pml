/* Bad input: a rank that can't make a call tells everyone instead of sending counts, and the group stays usable.
 *
 * Call n of a rank is good (a number of rows for the next rank) or bad. A bad one writes an ABORT record to every peer, and
 * nothing else, and raises at once. Others raise as soon as they see an ABORT, whether or not the other records are here. A
 * window that is too small is judged by every rank from the same records, so all raise. n is used up in each case.
 *
 * A rank that raised before it saw all records of n goes on. Records are read in order, and record n is published only when
 * those of n - NS have been read: without that it may overwrite record n - NREC in a peer's window unread. With NS = 1 that is
 * waiting out the records of an aborted call before the next one.
 *
 * Claims: all ranks raise or none; a call that doesn't raise reads the right rows; nobody hangs. A wait and its reads are one
 * step, as in exchange.pml.
 *
 * Parameters: R ranks (2 or 3), CALLS, NS calls whose records may be unread; GOOD_OR_BAD: a good call has rows that fit.
 * Faults
 *   FAULT_SOME_PEERS     only the next rank is told, the others get counts
 *   FAULT_AFTER_RECORD   found out after the record with counts was sent
 *   FAULT_NO_DRAIN       the next call begins at once, whatever hasn't been read
 *   FAULT_NOT_USED_UP    the aborter gives its next call the same number
 *   FAULT_LOCAL_VERDICT  only the rank whose window is too small finds that out
 */
#ifndef R
#define R 2
#endif
#ifndef CALLS
#define CALLS 4
#endif
#ifndef NS
#define NS 1
#endif
#define NREC (2 * NS)
#define NX (2 * NS) /* slots of x, read by pull */

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
#define MUST_READ false
#else
#define MUST_READ (n + 1 > heard + NS) /* before call n + 1 is published */
#endif

inline raise() {
  assert(!returned[n]);
  raised[n] = true
}

inline check_records(n_) {
  p = 0;
  do
  :: p < R -> assert(p == me || truth[REC(me, n_, p)] == n_); p++
  :: else -> break
  od;
  p = 0
}

inline finish() {
  p = 0;
  fits = mine != TOO_MANY;
  do
  :: p < R ->
     if
     :: p == me
     :: p != me ->
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
  byte heard; /* all records up to this call were read */
  bool fits;
  do
  :: atomic { n < CALLS && MUST_READ && ALL_RECORDS(heard + 1) -> heard++; check_records(heard) }
  :: atomic {
       n < CALLS && !MUST_READ ->
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
#ifndef FAULT_NO_DRAIN
     do /* what came before is read first */
     :: atomic { mine != ABORT && heard + 1 < n && ALL_RECORDS(heard + 1) -> heard++; check_records(heard) }
     :: mine == ABORT || heard + 1 >= n -> break
     od;
#endif
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
     :: atomic { mine != ABORT && !ABORT_HERE(n) && ALL_RECORDS(n) -> heard = n; check_records(n); finish() }
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
