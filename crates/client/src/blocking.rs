//! The client for ordinary programs: calls that wait, from any number of threads.

use std::{
    collections::HashMap,
    fmt,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use tracing::error;
use underpass_protocol::{
    client::{Completion, Doubt, Failure, Item, Outcome, Refused, Request},
    wire::{Kind, Operand, Status},
};

use crate::{
    config::Config,
    engine::{Engine, Waker, monotonic_ns},
    error::{Diagnosis, Error},
};

/// How long [`Client::connect`] waits for its sessions, at least.
const CONNECT_MIN: Duration = Duration::from_secs(1);
/// How long the client's thread waits when nothing is to be done; it is woken when something is.
const IDLE_WAIT: Duration = Duration::from_secs(3600);

/// A client of all shards of a configuration. Cheap to clone; its calls wait, and may be made from any thread. Each call
/// that is under way needs a session of the key's shard ([`Config::sessions`]), writes one of their own; a call that finds
/// none free waits for one within its deadline.
///
/// ```no_run
/// use underpass_client::{Client, Config, Error};
///
/// let client = Client::connect(Config::from_file("client.toml")?)?;
/// client.put(b"greeting", b"hello")?;
/// let item = client.get(b"greeting")?.expect("it was just put");
/// assert_eq!(item.value, b"hello");
///
/// match client.cas(b"greeting", b"good day", item.cas) {
///     Ok(outcome) => println!("{outcome:?}"),
///     Err(Error::Unknown { .. }) => println!("look again: it may have happened, or may yet"),
///     Err(error) => println!("it did not happen: {error}"),
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
    deadline: Duration,
}

/// A write that was carried out, and the version that it made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The item's `cas` from now on.
    pub cas: u64,
}

/// A number after an increment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Number {
    /// Its new value.
    pub number: i64,
    /// The item's `cas` from now on.
    pub cas: u64,
}

/// The outcome of a write with a condition. Either way the write is over, and linearized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the condition may not have held"]
pub enum Conditional<T> {
    /// The condition held and the write was carried out.
    Done(T),
    /// It did not: nothing was changed.
    Unmet(Unmet),
}

impl<T> Conditional<T> {
    /// What was done, if it was.
    pub fn done(self) -> Option<T> {
        match self {
            Self::Done(value) => Some(value),
            Self::Unmet(_) => None,
        }
    }
}

/// Why a condition did not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unmet {
    /// There is no such key.
    #[error("not found")]
    NotFound,
    /// ADD: the key exists. CAS: it has another `cas`.
    #[error("exists")]
    Exists,
    /// The replicas say no more than that.
    #[error("not stored")]
    NotStored,
    /// INCR: the value is not a decimal number of 64 bits.
    #[error("the value is not a decimal number")]
    NotANumber,
    /// INCR: the result does not fit.
    #[error("the result does not fit in 64 bits")]
    Overflow,
    /// APPEND, PREPEND, INCR: the result does not fit in a datagram.
    #[error("the result does not fit in a datagram")]
    TooLarge,
}

/// What a request came to, in the protocol's terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A read's answer; `None`: there is no such key.
    Read(Option<Item>),
    /// A write's result.
    Written {
        /// Whether its condition held.
        status: Status,
        /// Its sequence number.
        seq: u64,
        /// The new number, of an INCR with status OK.
        number: Option<i64>,
    },
}

/// One call, for whoever records histories: everything between `call_ns` and `return_ns`.
#[derive(Debug)]
pub struct Call<'a> {
    /// What was asked.
    pub request: Request<'a>,
    /// When it was called, by [`monotonic_ns`].
    pub call_ns: u64,
    /// When it returned.
    pub return_ns: u64,
    /// What it returned.
    pub result: &'a Result<Reply, Error>,
}

/// Told of every call when it returns, on the calling thread.
pub type Recorder = Box<dyn Fn(&Call<'_>) + Send + Sync>;

struct Shared {
    queue: Mutex<Queue>,
    waker: Waker,
    thread: Mutex<Option<JoinHandle<()>>>,
    recorder: Option<Recorder>,
}

#[derive(Default)]
struct Queue {
    jobs: Vec<Job>,
    /// Why the thread ended, if it did.
    ended: Option<String>,
}

struct Job {
    request: OwnedRequest,
    deadline_ns: u64,
    reply: SyncSender<Answer>,
}

type Answer = (Outcome, Diagnosis);

enum OwnedRequest {
    Read { key: Vec<u8> },
    Write { kind: Kind, key: Vec<u8>, ttl_ms: Option<u64>, expected: u64, delta: i64, data: Vec<u8> },
}

impl OwnedRequest {
    fn new(request: Request<'_>) -> Self {
        match request {
            Request::Read { key } => Self::Read { key: key.to_vec() },
            Request::Write { kind, key, operand } => Self::Write {
                kind,
                key: key.to_vec(),
                ttl_ms: operand.ttl_ms,
                expected: operand.expected,
                delta: operand.delta,
                data: operand.data.to_vec(),
            },
        }
    }

    fn borrow(&self) -> Request<'_> {
        match self {
            Self::Read { key } => Request::Read { key },
            &Self::Write { kind, ref key, ttl_ms, expected, delta, ref data } => {
                Request::Write { kind, key, operand: Operand { ttl_ms, expected, delta, data } }
            }
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

impl Client {
    /// Opens sessions with every shard's coordinator and starts the client's thread.
    ///
    /// # Errors
    /// [`Error::NoSession`] if a shard gives none within the configuration's deadline, or one second if that is longer.
    /// [`Error::Config`], [`Error::Io`].
    pub fn connect(config: Config) -> Result<Self, Error> {
        Self::start(config, None, true)
    }

    /// As [`Client::connect`], but waits for nobody: sessions are opened when they are needed, so that a shard that is
    /// down hinders only the operations on its own keys.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Io`].
    pub fn new(config: Config) -> Result<Self, Error> {
        Self::start(config, None, false)
    }

    /// As [`Client::connect`]; `recorder` is told of every call.
    pub fn connect_recorded(config: Config, recorder: Recorder) -> Result<Self, Error> {
        Self::start(config, Some(recorder), true)
    }

    fn start(config: Config, recorder: Option<Recorder>, wait: bool) -> Result<Self, Error> {
        let mut engine = Engine::new(&config)?;
        if wait {
            engine.open(config.deadline().max(CONNECT_MIN))?;
        }
        let shared =
            Arc::new(Shared { queue: Mutex::default(), waker: engine.waker(), thread: Mutex::new(None), recorder });
        let link = Arc::downgrade(&shared);
        let thread = thread::Builder::new()
            .name("underpass-client".to_owned())
            .spawn(move || {
                let mut worker = Worker { engine, waiting: HashMap::new(), backlog: Vec::new(), next_tag: 0 };
                // Also a panic must leave no caller waiting.
                let end = panic::catch_unwind(AssertUnwindSafe(|| worker.run(&link)));
                let why = match end {
                    Ok(Ok(())) => return,
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => "its thread panicked".to_owned(),
                };
                error!("the client's thread ends: {why}");
                let Some(shared) = link.upgrade() else { return };
                let mut queue = lock(&shared.queue);
                queue.ended = Some(why);
                worker.backlog.append(&mut queue.jobs);
                drop(queue);
                worker.abandon();
            })
            .map_err(|error| Error::io("start the client's thread", error))?;
        *lock(&shared.thread) = Some(thread);
        Ok(Self { shared, deadline: config.deadline() })
    }

    /// The same client with another deadline for its calls.
    pub fn with_deadline(&self, deadline: Duration) -> Self {
        Self { shared: self.shared.clone(), deadline }
    }

    /// The newest committed value of a key, or `None` if there is no such key.
    pub fn get(&self, key: &[u8]) -> Result<Option<Item>, Error> {
        match self.request(Request::Read { key })? {
            Reply::Read(item) => Ok(item),
            Reply::Written { .. } => unreachable!("a read is answered as a read"),
        }
    }

    /// Sets a key's value, for ever.
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<Stored, Error> {
        self.put_operand(key, operand(value))
    }

    /// Sets a key's value, to expire after `ttl` by the coordinator's clock. Parts of a millisecond count as a whole one.
    pub fn put_ttl(&self, key: &[u8], value: &[u8], ttl: Duration) -> Result<Stored, Error> {
        self.put_operand(key, Operand { ttl_ms: Some(lifetime_ms(ttl)), ..operand(value) })
    }

    fn put_operand(&self, key: &[u8], operand: Operand<'_>) -> Result<Stored, Error> {
        let (_, seq, _) = self.write(Kind::Put, key, operand)?;
        Ok(Stored { cas: seq })
    }

    /// Removes a key. Unmet if there is none.
    pub fn delete(&self, key: &[u8]) -> Result<Conditional<()>, Error> {
        Ok(self.conditional(Kind::Delete, key, operand(b""))?.map(|_| ()))
    }

    /// Sets a key's value if there is no such key.
    pub fn add(&self, key: &[u8], value: &[u8]) -> Result<Conditional<Stored>, Error> {
        self.stored(Kind::Add, key, operand(value))
    }

    /// Sets a key's value if there is such a key.
    pub fn replace(&self, key: &[u8], value: &[u8]) -> Result<Conditional<Stored>, Error> {
        self.stored(Kind::Replace, key, operand(value))
    }

    /// Sets a key's value if its `cas` is still `expected`.
    pub fn cas(&self, key: &[u8], value: &[u8], expected: u64) -> Result<Conditional<Stored>, Error> {
        self.stored(Kind::Cas, key, Operand { expected, ..operand(value) })
    }

    /// Adds to the signed decimal number that is a key's value.
    pub fn incr(&self, key: &[u8], delta: i64) -> Result<Conditional<Number>, Error> {
        let outcome = self.conditional(Kind::Incr, key, Operand { delta, ..operand(b"") })?;
        Ok(outcome.map(|(cas, number)| Number { number: number.expect("an INCR that is OK has a number"), cas }))
    }

    /// Adds data behind a key's value.
    pub fn append(&self, key: &[u8], data: &[u8]) -> Result<Conditional<Stored>, Error> {
        self.stored(Kind::Append, key, operand(data))
    }

    /// Adds data in front of a key's value.
    pub fn prepend(&self, key: &[u8], data: &[u8]) -> Result<Conditional<Stored>, Error> {
        self.stored(Kind::Prepend, key, operand(data))
    }

    /// Gives a key another lifetime from now on; `None`: for ever. Its value and `cas` stay.
    pub fn touch(&self, key: &[u8], ttl: Option<Duration>) -> Result<Conditional<()>, Error> {
        let ttl_ms = Some(ttl.map_or(0, lifetime_ms));
        Ok(self.conditional(Kind::Touch, key, Operand { ttl_ms, ..operand(b"") })?.map(|_| ()))
    }

    fn stored(&self, kind: Kind, key: &[u8], operand: Operand<'_>) -> Result<Conditional<Stored>, Error> {
        Ok(self.conditional(kind, key, operand)?.map(|(cas, _)| Stored { cas }))
    }

    fn conditional(
        &self,
        kind: Kind,
        key: &[u8],
        operand: Operand<'_>,
    ) -> Result<Conditional<(u64, Option<i64>)>, Error> {
        let (status, seq, number) = self.write(kind, key, operand)?;
        Ok(match unmet(kind, status) {
            None => Conditional::Done((seq, number)),
            Some(unmet) => Conditional::Unmet(unmet),
        })
    }

    fn write(&self, kind: Kind, key: &[u8], operand: Operand<'_>) -> Result<(Status, u64, Option<i64>), Error> {
        match self.request(Request::Write { kind, key, operand })? {
            Reply::Written { status, seq, number } => Ok((status, seq, number)),
            Reply::Read(_) => unreachable!("a write is answered as a write"),
        }
    }

    /// Any request, such as a kind of write with a lifetime that has no method of its own.
    pub fn request(&self, request: Request<'_>) -> Result<Reply, Error> {
        let call_ns = monotonic_ns();
        let result = self.perform(call_ns, request);
        if let Some(recorder) = &self.shared.recorder {
            recorder(&Call { request, call_ns, return_ns: monotonic_ns(), result: &result });
        }
        result
    }

    fn perform(&self, call_ns: u64, request: Request<'_>) -> Result<Reply, Error> {
        request.validate()?;
        let deadline = u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX);
        let (reply, answer) = sync_channel(1);
        let job = Job { request: OwnedRequest::new(request), deadline_ns: call_ns.saturating_add(deadline), reply };
        {
            let mut queue = lock(&self.shared.queue);
            if let Some(why) = &queue.ended {
                return Err(Error::Stopped(why.clone()));
            }
            queue.jobs.push(job);
        }
        self.shared.waker.wake();
        receive(&answer)
    }
}

fn receive(answer: &Receiver<Answer>) -> Result<Reply, Error> {
    let (outcome, at) = answer.recv().expect("the client's thread answers every job, also when it ends");
    match outcome {
        Outcome::Read(item) => Ok(Reply::Read(item)),
        Outcome::Written { status, seq, number } => Ok(Reply::Written { status, seq, number }),
        Outcome::Failed(failure) => Err(Error::Failed { at, failure }),
        Outcome::Unknown(doubt) => Err(Error::Unknown { at, doubt }),
        Outcome::TimedOut { last, sent } => Err(Error::TimedOut { at, last, sent }),
    }
}

impl<T> Conditional<T> {
    fn map<U>(self, f: impl FnOnce(T) -> U) -> Conditional<U> {
        match self {
            Self::Done(value) => Conditional::Done(f(value)),
            Self::Unmet(unmet) => Conditional::Unmet(unmet),
        }
    }
}

/// What a status other than OK of this kind of write means. On the wire ADD, REPLACE, APPEND and PREPEND have one, as in
/// memcached's protocol, for two conditions.
pub(crate) fn unmet(kind: Kind, status: Status) -> Option<Unmet> {
    match status {
        Status::NotStored if kind == Kind::Add => Some(Unmet::Exists),
        Status::NotStored if matches!(kind, Kind::Replace | Kind::Append | Kind::Prepend) => Some(Unmet::NotFound),
        Status::Ok => None,
        Status::NotFound => Some(Unmet::NotFound),
        Status::Exists => Some(Unmet::Exists),
        Status::NotStored => Some(Unmet::NotStored),
        Status::NotANumber => Some(Unmet::NotANumber),
        Status::Overflow => Some(Unmet::Overflow),
        Status::TooLarge => Some(Unmet::TooLarge),
        Status::Aborted => unreachable!("a session never takes it for an outcome"),
    }
}

fn operand(data: &[u8]) -> Operand<'_> {
    Operand { ttl_ms: None, expected: 0, delta: 0, data }
}

/// On the wire 0 is for ever, so the shortest lifetime is 1.
pub(crate) fn lifetime_ms(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX).max(1)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What it guards is whole at every moment, also when a thread panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.waker.wake();
        if let Some(thread) = lock(&self.thread).take()
            && thread.thread().id() != thread::current().id()
        {
            // Sessions are closed by its engine's drop. A panic there has been reported by its own thread.
            let _ = thread.join();
        }
    }
}

struct Caller {
    reply: SyncSender<Answer>,
    shard: usize,
    is_write: bool,
}

/// The client's thread.
struct Worker {
    engine: Engine,
    /// Callers by tag.
    waiting: HashMap<u64, Caller>,
    /// Jobs for which no session was free, at most one for each calling thread.
    backlog: Vec<Job>,
    next_tag: u64,
}

impl Worker {
    /// Works until the last client is dropped.
    fn run(&mut self, shared: &Weak<Shared>) -> Result<(), Error> {
        let mut done = Vec::new();
        loop {
            let timeout = self
                .backlog
                .iter()
                .map(|job| job.deadline_ns)
                .min()
                .map_or(IDLE_WAIT, |deadline| Duration::from_nanos(deadline.saturating_sub(monotonic_ns())));
            self.engine.poll(timeout, &mut done)?;
            done.drain(..).for_each(|completion| self.answer(completion));
            // No strong reference is kept: the last client's drop ends this thread.
            let Some(shared) = shared.upgrade() else { return Ok(()) };
            self.backlog.append(&mut lock(&shared.queue).jobs);
            if let Some(shared) = Arc::into_inner(shared) {
                // The last client was dropped in between. Its drop must not wait for this very thread.
                drop(shared);
                return Ok(());
            }
            self.submit();
        }
    }

    fn submit(&mut self) {
        let now = monotonic_ns();
        for job in std::mem::take(&mut self.backlog) {
            let tag = self.next_tag;
            let request = job.request.borrow();
            let shard = self.engine.shard_of(request.key());
            match self.engine.submit(request, tag, job.deadline_ns) {
                Ok(()) => {
                    self.next_tag += 1;
                    let is_write = matches!(job.request, OwnedRequest::Write { .. });
                    self.waiting.insert(tag, Caller { reply: job.reply, shard, is_write });
                }
                Err(Refused::Full) if now < job.deadline_ns => self.backlog.push(job),
                Err(Refused::Full) => self.decline(job),
                Err(Refused::Invalid(_)) => unreachable!("the caller has validated it"),
            }
        }
    }

    fn answer(&mut self, completion: Completion) {
        let Caller { reply, shard, .. } = self.waiting.remove(&completion.tag).expect("every tag is of a caller");
        // The caller is waiting: a call has no other end than this.
        let _ = reply.send((completion.outcome, self.engine.diagnosis(shard)));
    }

    /// Answers everybody when the thread cannot go on.
    fn abandon(&mut self) {
        for (_, Caller { reply, shard, is_write }) in self.waiting.drain() {
            let outcome =
                if is_write { Outcome::Unknown(Doubt::Ended) } else { Outcome::TimedOut { last: None, sent: true } };
            let _ = reply.send((outcome, self.engine.diagnosis(shard)));
        }
        for job in std::mem::take(&mut self.backlog) {
            self.decline(job);
        }
    }

    /// Ends a job that was never sent.
    fn decline(&self, job: Job) {
        let shard = self.engine.shard_of(job.request.borrow().key());
        let outcome = match job.request {
            OwnedRequest::Read { .. } => Outcome::TimedOut { last: None, sent: false },
            OwnedRequest::Write { .. } => Outcome::Failed(Failure::NeverSent(None)),
        };
        let _ = job.reply.send((outcome, self.engine.diagnosis(shard)));
    }
}
