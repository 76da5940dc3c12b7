/*
 * outbox.pml - safety and liveness model of a transactional outbox + dispatcher.
 *
 * One database row per entry, two dispatchers that claim with a lease, one
 * downstream (-DDEDUP: remembers idempotency keys for W ticks; otherwise none),
 * an application that may cancel, an operator/reconciler, a DB failover that may
 * lose the newest commits, and a clock.  Pauses, crashes, lost requests, lost
 * responses and lost completion writes can happen at every interleaving point.
 *
 * Every guard of the design is ON by default; -DNO_<GUARD> removes one so that
 * spin shows which invariant depends on it:
 *   NO_FENCE        completion does not compare the lease token
 *   COUNTER_FENCE   lease token is the attempt counter, stored in the row
 *   NO_STATE        transitions do not check the prior state
 *   NO_WINDOW       resend is not bounded by the downstream's dedup window
 *   NO_LEASECHECK   sender does not check its own lease deadline before sending
 *   NO_STICKY       an ambiguous attempt is forgotten by a later definite one,
 *                   and exhausted retries go to DEAD
 *   NO_G409         "409 another request with this key is running" taken as done
 *   NO_SCOPE        child key is not scoped by tenant/operation (NENT=2)
 *   NO_DETKEY       child key is random per enqueue (needs -DRECREATE)
 *   NO_QUAR         nothing special happens after a failover (needs -DFAILOVER)
 *   NO_QUIESCE      reconciler re-queues without waiting out old leases
 *   NO_ATCLAIM      attempts are counted at completion, not at claim
 *   REJ_CONCLUSIVE  any refusal is taken as proof that no earlier attempt succeeded
 *   BLIND_EPOCH     the key changes on a person's word who has not looked
 *   NO_KNOWN        an outcome whose callback raised is forgotten, and the entry sent again
 *   KNOWN_CANCELLABLE  an entry whose callback raised may be cancelled
 *   KNOWN_LIMITED   what is known is given up with the attempts, or with the window
 *   NO_CBFENCE      the callback runs outside the settling transaction
 * Environment:
 *   DEDUP FAILOVER RECREATE RECON EXTEND SKEW=n UNBOUNDED POISON NENT=n
 *   DECLINES: the downstream may decline, and store that under the key (a conclusive rejection)
 *   PERSON: a person decides about an uncertain entry: happened, did not happen, send again
 *   CALLBACKS: settling as delivered runs a callback in the same transaction, which may raise
 *   LATE_OK: a fenced-out success may still turn sending/retry/uncertain into delivered
 */
#ifndef NENT
#define NENT 1
#endif
#ifndef T
#define T 8               /* clock horizon; at T everything counts as expired */
#endif
#ifndef L
#define L 2               /* lease length                                      */
#endif
#ifndef W
#define W 4               /* downstream remembers a key for >= W ticks          */
#endif
#ifndef M
#define M 1               /* bound on check->syscall pause + transit + execute  */
#endif
#ifndef SKEW
#define SKEW 0            /* sender's clock runs behind the database's          */
#endif
#ifndef MAXATT
#define MAXATT 3
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef NMSG
#define NMSG 2
#endif
#define NKEY 4

/* row states */
#define NONE 0
#define PENDING 1
#define SENDING 2
#define RETRY 3
#define DELIVERED 4
#define DEAD 5            /* promise: the effect did NOT happen                 */
#define UNCERTAIN 6       /* we do not know; no automatic resend                */
#define CANCELLED 7       /* promise: the effect did NOT happen                 */

/* response codes */
#define R_NONE 0
#define R_OK 1
#define R_REJ 2           /* definite: this request was not executed            */
#define R_500 3           /* ambiguous                                          */
#define R_409 4           /* same key is executing right now                    */
#define R_TIMEOUT 5
#define R_NOTSENT 6
#define R_DECL 7            /* declined, and stored under this key              */

typedef Row { byte st; byte tok; byte att; byte first; byte lease; bool maybe; byte key; byte born; bool known };
typedef Msg { byte ph; byte e; byte key; byte sent; byte d; byte tok };  /* ph 0 free 1 network 2 executing */

Row db[NENT]; Row snap[NENT];
Msg net[NMSG];
byte now = 1;
byte seen[NKEY]; byte seen_at[NKEY];   /* 0 unknown 1 executing 2 stored OK 3 stored 500 */
byte eff[NENT];
byte cbs[NENT];           /* ghost: how often the callback's effects were committed */
byte rcode[2]; byte rtok[2];
byte mytok[2];            /* lease token each dispatcher believes it holds     */
byte hold[2];             /* ghost: end of the lease each dispatcher believes in */
byte nkey = 0;
byte crashes = CRASHES;
byte failovers = 0;
byte grace = 0;           /* after a failover: nobody claims before this time  */

#define CLAIMABLE(x) (EXPIRED(grace) && (db[x].st == PENDING || db[x].st == RETRY || \
                      (db[x].st == SENDING && EXPIRED(db[x].lease))))
#define TERMINAL(s) (s==DELIVERED || s==DEAD || s==UNCERTAIN || s==CANCELLED)
#define EXPIRED(x) (now >= x || now == T)
#define LNOW (now - (now > SKEW -> SKEW : now - 1))
#define P1(e) assert(eff[e] <= 1)                                  /* P1 no double effect  */
#define P2(e) assert(db[e].st != DELIVERED || eff[e] >= 1)         /* P2 delivered is true  */
#define P3(e) assert(db[e].st != DEAD || eff[e] == 0)              /* P3 dead is true       */
#define P4(e) assert(db[e].st != CANCELLED || eff[e] == 0)         /* P4 cancelled is true  */
/* P5: never two dispatchers inside a lease of the same entry at once          */
#if NENT > 1 || defined(NO_P5)
#define P5(d,e)
#else
#define P5(d,e) assert(hold[1-d] == 0 || EXPIRED(hold[1-d]))
#endif
#ifdef CALLBACKS
#define P6(e) assert(cbs[e] <= 1 && (db[e].st == DELIVERED) == (cbs[e] == 1))  /* P6 a callback's effects commit once, with the settling */
#define P7(e) assert(!db[e].known || (db[e].st != DEAD && db[e].st != UNCERTAIN)) /* P7 what is known is not lost */
#define DELIVER(e) db[e].st = DELIVERED; cbs[e]++; db[e].known = false
#else
#define P6(e) skip
#define P7(e) skip
#define DELIVER(e) db[e].st = DELIVERED
#endif
#define INV(e) P1(e); P2(e); P3(e); P4(e); P6(e); P7(e)

#ifdef KNOWN_LIMITED
#define KNOWN(e) false
#else
#define KNOWN(e) db[e].known
#endif

#ifdef NO_WINDOW
#define WINDOW_OK(f,n) true
#else
#define WINDOW_OK(f,n) (f == 0 || (n + M < f + W && now != T))
#endif

/* a fresh token = one that occurs nowhere (a random 128-bit value in reality) */
#if NENT > 1
#define INUSE1(x) || db[1].tok == x
#else
#define INUSE1(x)
#endif
#if NMSG > 2
#define INUSE2(x) || net[2].tok == x
#else
#define INUSE2(x)
#endif
#define INUSE(x) (db[0].tok == x || snap[0].tok == x || mytok[0] == x || mytok[1] == x || \
  net[0].tok == x || net[1].tok == x || rtok[0] == x || rtok[1] == x INUSE1(x) INUSE2(x))
inline fresh(dst) {
  dst = 1;
  do :: INUSE(dst) -> dst++ :: else -> break od
}

/* window counts from the first attempt whose fate is not known to be "not executed" */
#ifdef NO_STICKY
#define FORGET(e) skip
#else
#define FORGET(e) if :: !db[e].maybe -> db[e].first = 0 :: else fi
#endif

inline create(e) {
  db[e].st = PENDING; db[e].att = 0; db[e].first = 0; db[e].maybe = false;
  db[e].lease = 0; db[e].born = now; db[e].tok = 0;
#ifndef NO_QUAR
  db[e].maybe = (failovers > 0);   /* an earlier incarnation may have been sent and lost */
#endif
#ifdef NO_DETKEY
  db[e].key = nkey; nkey++;
#else
#ifdef NO_SCOPE
  db[e].key = 0;
#else
  db[e].key = e;
#endif
#endif
}

/* ---------------------------------------------------------------- dispatcher */
proctype Disp(byte d) {
  byte e; byte tok; byte lease; byte first; byte key; byte out; byte i;
  bool perm; bool owed;
idle:
  atomic { e = 0; tok = 0; lease = 0; first = 0; key = 0; out = 0; i = 0; perm = false; owed = false;
    mytok[d] = 0; hold[d] = 0 }
end_idle:
  do
  :: atomic {                                    /* claim = one DB transaction */
       if
       :: CLAIMABLE(0) -> e = 0
#if NENT > 1
       :: CLAIMABLE(1) -> e = 1
#endif
       fi;
       if
       :: db[e].st == SENDING ->                 /* take-over of an expired lease */
#ifndef NO_STICKY
            db[e].maybe = true;
#endif
#ifndef DEDUP
#ifndef NO_STICKY
            if :: db[e].known -> goto taken :: else fi;
            db[e].tok = 0; db[e].st = UNCERTAIN; INV(e); goto idle;
#endif
#endif
            skip
       :: else
       fi;
taken: if
#ifdef NO_ATCLAIM
       :: false
#else
       :: db[e].att >= MAXATT && !KNOWN(e) ->
#ifdef NO_STICKY
            db[e].st = DEAD;
#else
            if :: db[e].maybe -> db[e].st = UNCERTAIN :: else -> db[e].st = DEAD fi;
#endif
            INV(e); goto idle
#endif
       :: else
       fi;
       if
       :: !WINDOW_OK(db[e].first, now) && !KNOWN(e) -> db[e].st = UNCERTAIN; INV(e); goto idle
       :: else
       fi;
       db[e].st = SENDING;
#ifndef NO_ATCLAIM
       db[e].att = db[e].att + 1;
#endif
       db[e].lease = now + L;
       if :: db[e].first == 0 -> db[e].first = now :: else fi;
#ifdef COUNTER_FENCE
       db[e].tok = db[e].att;
#else
       db[e].tok = 0; fresh(i); db[e].tok = i; i = 0;
#endif
       P5(d,e);
       hold[d] = now + L; mytok[d] = db[e].tok; tok = db[e].tok; owed = db[e].known; first = db[e].first; key = db[e].key;
       /* local deadline starts from a clock read BEFORE the claim request */
       lease = db[e].lease;
       INV(e)
     } -> break
  od;

#ifdef CALLBACKS
  if                                             /* known: only its callback is owed */
  :: atomic { owed -> out = R_OK; lease = 0; first = 0; key = 0; goto settle }
  :: else
  fi;
#endif

  /* crash / pause point: after claim commit, before send */
  if
  :: crashes > 0 -> crashes--; goto idle
  :: skip
  fi;

#ifdef EXTEND
  if                                             /* heartbeat: fenced extension */
  :: atomic { db[e].tok == tok && db[e].st == SENDING && now < db[e].lease ->
              db[e].lease = now + L; lease = db[e].lease; hold[d] = lease }
  :: skip
  fi;
#endif

  /* pre-send check and hand-over to the kernel; pause in between counts into M */
  atomic {
    if
#ifndef NO_LEASECHECK
    :: !(LNOW < lease) || now == T -> out = R_NOTSENT
#endif
    :: !WINDOW_OK(first, LNOW) -> out = R_NOTSENT
    :: else ->
         i = 0;
         do
         :: i < NMSG && net[i].ph != 0 -> i++
         :: else -> break
         od;
         if
         :: i < NMSG ->
              net[i].ph = 1; net[i].e = e; net[i].key = key; net[i].sent = now;
              net[i].d = d; net[i].tok = tok; rcode[d] = R_NONE; rtok[d] = tok;
              out = R_NONE
         :: else -> out = R_NOTSENT
         fi; i = 0
    fi;
    lease = 0; first = 0; key = 0                /* dead locals, keep states few */
  }
#ifdef POISON
  goto idle;                                     /* this payload always kills us */
#endif
  if
  :: out == R_NOTSENT
  :: else ->
       if                                        /* response, timeout, or crash  */
       :: atomic { rcode[d] != R_NONE && rtok[d] == tok -> out = rcode[d]; rcode[d] = R_NONE; rtok[d] = 0 }
       :: atomic { out = R_TIMEOUT; rcode[d] = R_NONE; rtok[d] = 0 }
       :: crashes > 0 -> atomic { crashes--; rcode[d] = R_NONE; rtok[d] = 0; goto idle }
       fi
  fi;

  /* crash / pause point: response known, completion not written */
  if
  :: crashes > 0 -> crashes--; goto idle
  :: skip
  fi;

settle:
#ifdef NO_CBFENCE
  if :: out == R_OK -> cbs[e]++; assert(cbs[e] <= 1) :: else fi;
#endif
  atomic {                                       /* completion = one UPDATE     */
    if
#ifdef LATE_OK                                   /* proof of the effect is always welcome */
    :: (out == R_OK && db[e].tok != tok && (db[e].st == SENDING || db[e].st == RETRY || db[e].st == UNCERTAIN)) ->
       DELIVER(e); db[e].tok = 0; db[e].att = 0; db[e].lease = 0; db[e].first = 0; db[e].maybe = false; INV(e)
#endif
    :: (true
#ifndef NO_STATE
        && db[e].st == SENDING
#endif
#ifndef NO_FENCE
        && db[e].tok == tok
#endif
        && db[e].st != NONE) ->
#ifdef NO_ATCLAIM
       db[e].att = db[e].att + 1;
#endif
       if :: perm = true :: perm = false fi;
       if
#ifdef NO_CBFENCE
       :: out == R_OK -> db[e].st = DELIVERED
#else
       :: out == R_OK -> DELIVER(e)
#endif
#ifdef CALLBACKS
       :: out == R_OK ->                         /* the callback raises: keep what is known, try it again later */
#ifndef NO_KNOWN
          db[e].known = true;
#endif
#ifndef KNOWN_CANCELLABLE
          db[e].maybe = true;
#endif
          db[e].st = RETRY
#endif
#ifdef DECLINES
       :: out == R_DECL -> db[e].st = DEAD       /* conclusive: whatever was in doubt */
#endif
       :: out == R_NOTSENT -> db[e].st = RETRY; FORGET(e)
       :: out == R_409 ->
#ifdef NO_G409
          db[e].st = DELIVERED
#else
          db[e].maybe = true;
          if :: db[e].att < MAXATT -> db[e].st = RETRY :: else -> db[e].st = UNCERTAIN fi
#endif
       :: out == R_REJ ->
          if
          :: !perm && db[e].att < MAXATT -> db[e].st = RETRY; FORGET(e)
          :: else ->
#if defined(NO_STICKY) || defined(REJ_CONCLUSIVE)
             db[e].st = DEAD
#else
             if :: db[e].maybe -> db[e].st = UNCERTAIN :: else -> db[e].st = DEAD fi
#endif
          fi
       :: out == R_500 || out == R_TIMEOUT ->
#ifdef NO_STICKY
          if :: db[e].att < MAXATT -> db[e].st = RETRY :: else -> db[e].st = DEAD fi
#else
          db[e].maybe = true;
#ifdef DEDUP
          if :: db[e].att < MAXATT -> db[e].st = RETRY :: else -> db[e].st = UNCERTAIN fi
#else
          db[e].st = UNCERTAIN
#endif
#endif
       fi;
       db[e].tok = 0;
#ifndef NO_STATE
       if
       :: db[e].st == DELIVERED || db[e].st == DEAD ->
            db[e].att = 0; db[e].lease = 0; db[e].first = 0; db[e].maybe = false
       :: db[e].st == RETRY -> db[e].lease = 0
       :: else
       fi;
#endif
       INV(e)
    :: else -> skip                              /* fenced out: 0 rows updated  */
    fi;
    hold[d] = 0; mytok[d] = 0
  }
  goto idle
}

inline reply(i, code) {
  if :: rtok[net[i].d] == net[i].tok -> rcode[net[i].d] = code :: else fi;
  net[i].ph = 0; net[i].e = 0; net[i].key = 0; net[i].sent = 0; net[i].d = 0; net[i].tok = 0
}

/* ---------------------------------------------------------------- downstream */
active proctype Down() {
  byte i;
end_down:
  do
  :: atomic {
       if
       :: net[0].ph != 0 -> i = 0
       :: net[1].ph != 0 -> i = 1
#if NMSG > 2
       :: net[2].ph != 0 -> i = 2
#endif
       fi;
       if
       :: net[i].ph == 1 ->
          if
          :: net[i].ph = 0                                       /* request lost */
#ifdef DEDUP
          :: seen[net[i].key] == 2 -> reply(i, R_OK)             /* stored reply */
          :: seen[net[i].key] == 3 -> reply(i, R_500)
#ifdef DECLINES
          :: seen[net[i].key] == 4 -> reply(i, R_DECL)
#endif
          :: seen[net[i].key] == 1 -> reply(i, R_409)
          :: seen[net[i].key] == 0 -> reply(i, R_REJ)            /* 429/401/400: nothing stored */
          :: seen[net[i].key] == 0 ->
             seen[net[i].key] = 1; seen_at[net[i].key] = now; net[i].ph = 2
#else
          :: true -> reply(i, R_REJ)
          :: net[i].ph = 2
#endif
          fi
       :: net[i].ph == 2 ->
          if
          :: eff[net[i].e]++; P1(net[i].e); P3(net[i].e); P4(net[i].e);
#ifdef DEDUP
             seen[net[i].key] = 2;
#endif
             reply(i, R_OK)
          :: eff[net[i].e]++; P1(net[i].e); P3(net[i].e); P4(net[i].e);
#ifdef DEDUP
             seen[net[i].key] = 3;
#endif
             reply(i, R_500)
          :: true ->
#ifdef DEDUP
             seen[net[i].key] = 3;
#endif
             reply(i, R_500)                                     /* 500, nothing done */
#ifdef DECLINES
          :: seen[net[i].key] = 4; reply(i, R_DECL)              /* declined, nothing done */
#endif
          :: true ->
#ifdef DEDUP
             seen[net[i].key] = 0; seen_at[net[i].key] = 0;
#endif
             reply(i, R_REJ)
          fi
       fi;
       i = 0
     }
#ifdef DEDUP
  :: atomic { seen[0] >= 2 && now >= seen_at[0] + W -> seen[0] = 0; seen_at[0] = 0 }   /* pruned */
  :: atomic { seen[1] >= 2 && now >= seen_at[1] + W -> seen[1] = 0; seen_at[1] = 0 }
#endif
  od
}

/* ---------------------------------------------------------------- environment */
#ifdef UNBOUNDED
#define YOUNG(i) true
#else
#define YOUNG(i) (net[i].ph == 0 || now < net[i].sent + M)
#endif

active proctype Clock() {
end_clock:
  do
#if NMSG > 2
  :: atomic { now < T && YOUNG(0) && YOUNG(1) && YOUNG(2) -> now++ }
#else
  :: atomic { now < T && YOUNG(0) && YOUNG(1) -> now++ }
#endif
  od
}

active proctype App() {
  byte e;
  atomic { e = 0; do :: e < NENT -> create(e); snap[e].st = NONE; e++ :: else -> break od; e = 0;
#ifndef RECREATE
    e = 0;
    snap[0].st = PENDING; snap[0].key = db[0].key; snap[0].born = now;
#endif
    run Disp(0); run Disp(1) }
#ifdef RECREATE
end_app:
  do
  :: atomic { db[0].st == NONE -> create(0) }    /* client retries its request  */
  od
#else
#ifndef NO_CANCEL
  if                                             /* cancel once, or never       */
  :: atomic {
       (db[0].st != NONE && !TERMINAL(db[0].st)
#ifndef NO_STATE
       && db[0].st != SENDING
#ifndef NO_STICKY
       && !db[0].maybe
#endif
#endif
       ) -> db[0].st = CANCELLED; INV(0) }
  :: true
  fi
#endif
#endif
}

#ifdef RECON
active proctype Reconciler() {                   /* asks the downstream; perfect query */
  byte n = 0;
end_rec:
  do
  :: atomic { n < 1 && db[0].st == UNCERTAIN && eff[0] >= 1 -> n++; DELIVER(0); INV(0) }
  :: atomic { (n < 1 && db[0].st == UNCERTAIN && eff[0] == 0
#ifndef NO_QUIESCE
       && now >= db[0].lease + M && now < T
#endif
       ) -> n++; db[0].st = PENDING; db[0].maybe = false; db[0].att = 0; db[0].first = 0;
          db[0].key = db[0].key + 1; INV(0) }
  od
}
#endif

#ifdef PERSON
active proctype Somebody() {                     /* looks, and tells the truth, at a moment of their own */
  byte n = 0;
end_person:
  do
  :: atomic { n < 1 && db[0].st == UNCERTAIN && eff[0] >= 1 -> n++; DELIVER(0); INV(0) }
  :: atomic { (n < 1 && db[0].st == UNCERTAIN && eff[0] == 0
#ifndef NO_QUIESCE
       && now >= db[0].lease + M && now < T
#endif
       ) -> n++; db[0].st = DEAD; INV(0) }
  :: atomic { (n < 1 && db[0].st == UNCERTAIN            /* send again, same key: nobody needs to have looked */
#ifdef DEDUP
       && db[0].first != 0 && WINDOW_OK(db[0].first, now)
#else
       && eff[0] == 0
#endif
#ifndef NO_QUIESCE
       && now >= db[0].lease + M && now < T
#endif
       ) -> n++; db[0].st = PENDING; db[0].att = 0; INV(0) }
  :: atomic { (n < 1 && db[0].st == UNCERTAIN            /* send again, new key */
#ifndef BLIND_EPOCH
       && eff[0] == 0
#endif
#ifndef NO_QUIESCE
       && now >= db[0].lease + M && now < T
#endif
       ) -> n++; db[0].st = PENDING; db[0].att = 0; db[0].first = 0; db[0].key = db[0].key + 1; INV(0) }
  od
}
#endif

#ifdef FAILOVER
active proctype Cluster() {
  byte x = 0;
end_rep:
  do
  :: atomic { failovers == 0 && db[0].st != NONE ->            /* replicate       */
       snap[0].st = db[0].st; snap[0].tok = db[0].tok; snap[0].att = db[0].att;
       snap[0].first = db[0].first; snap[0].lease = db[0].lease; snap[0].maybe = db[0].maybe;
       snap[0].key = db[0].key; snap[0].born = db[0].born }
  :: atomic { failovers == 0 && db[0].st != NONE -> failovers = 1;
       db[0].st = snap[0].st; db[0].tok = snap[0].tok; db[0].att = snap[0].att;
       db[0].first = snap[0].first; db[0].lease = snap[0].lease; db[0].maybe = snap[0].maybe;
       db[0].key = snap[0].key; db[0].born = snap[0].born;
#ifndef NO_QUAR
       grace = now + L;
       if
       :: db[0].st != NONE && !TERMINAL(db[0].st) ->
            db[0].maybe = true; db[0].first = db[0].born; db[0].lease = now + L;
            db[0].tok = 0; fresh(x); db[0].tok = x; x = 0;
#ifdef DEDUP
            db[0].st = SENDING                   /* leased to nobody: wait one lease */
#else
            db[0].st = UNCERTAIN
#endif
       :: else
       fi;
#endif
       INV(0) }
  od
}
#endif

#define settled (TERMINAL(db[0].st))
ltl live { <> settled }
