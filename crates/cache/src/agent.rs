//! The agent: loads and attaches, asks memcached for what clients miss, installs it, and keeps flushes that are to come.

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet, VecDeque},
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    rc::Rc,
    sync::{
        atomic::Ordering,
        mpsc::{self, Receiver, Sender},
    },
    time::Duration,
};

use anyhow::{Context, Result, bail};
use libbpf_rs::{RingBuffer, RingBufferBuilder};
use rustix::process::{Pid, PidfdFlags};
use underpass_abi::cache::{
    UC_ADDRESSES, UC_COUNT_OTHER, UC_GENERATION, UC_KEY_MAX, UC_NOTICE_FLUSH, UC_NOTICE_LET_GO, UC_WRITE, uc_prefix,
    uc_report, uc_settings, uc_stored,
};
use underpass_datapath::attach::{Mode, interface_index};

use crate::{
    admission::Doorkeeper,
    hash,
    kernel::{Kernel, Sizes, now_ms, wait_for_programs},
    limit::MBIT,
    memcached::{Answer, Memcached, flush_to_come, parse_answer},
    model::SLACK,
    stats::Counts,
    table::{Install, Item, Table},
    word,
};

/// An item is asked for anew after so long: memcached would take one that nobody asks for as cold.
const AGE_MAX_MS: u64 = 60_000;
/// Beyond the model's slack: the kernel's clock is as coarse as its tick.
const TICK_MS: u64 = 50;
/// Items asked for at once.
const ASKED_MAX: usize = 1024;
/// Keys that cannot be cached are not asked for again within this, and so many are remembered.
const REFUSED_MS: u64 = 10_000;
const REFUSED_MAX: usize = 65_536;
/// Bytes read from memcached at once.
const BUFFER: usize = 65_536;
/// Flushes that are to come and are kept apart.
const FLUSHES_MAX: usize = 16;
/// How long memcached is given for the commands that it had in hand when it began to be followed.
const SETTLE: Duration = Duration::from_millis(250);
/// How long the agent's thread runs at a time: the least that the kernel takes.
const TURN: Duration = Duration::from_micros(100);
/// memcached takes a longer delay for a time.
const DELAY_MAX_S: u64 = 60 * 60 * 24 * 30;

/// What the agent is started with.
#[derive(Clone, Debug)]
pub struct Options {
    /// Interface, of the caller's network namespace.
    pub device: String,
    /// XDP mode.
    pub mode: Mode,
    /// Memory for directory and slots.
    pub mib: u32,
    /// Ways of a set.
    pub ways: usize,
    /// Whom answers longer than the request are sent to.
    pub trusted: Vec<(Ipv4Addr, u8)>,
    /// Mbit/s that each address is sent in such answers; 0: no limit.
    pub limit: u64,
}

struct Asked {
    key: Vec<u8>,
    words: [u64; 2],
    at_ms: u64,
}

/// The connection to memcached.
struct Connection {
    stream: TcpStream,
    out: Vec<u8>,
    input: Vec<u8>,
    asked: VecDeque<Asked>,
}

/// From when to when it is not known whether an item has been flushed.
#[derive(Clone, Copy, Debug)]
struct Flush {
    from_ms: u64,
    to_ms: u64,
}

/// A cache in front of one running memcached.
pub struct Agent {
    options: Options,
    memcached: Memcached,
    alive: OwnedFd,
    // The ring before the kernel, whose maps it reads.
    rings: RingBuffer<'static>,
    given: Rc<Given>,
    kernel: Kernel,
    table: Table,
    connection: Connection,
    asked_keys: HashSet<Vec<u8>>,
    refused: HashMap<u64, u64>,
    flushes: Vec<Flush>,
    looked: u32,
    to_grace: Sender<Vec<u32>>,
    from_grace: Receiver<Vec<u32>>,
    in_grace: bool,
    counts: Counts,
    buffer: Box<[u8]>,
    doorkeeper: Doorkeeper,
}

fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    // SAFETY: a writable buffer of this length.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got != bytes.len() as isize {
        bail!("the kernel gives no random numbers: {}", std::io::Error::last_os_error());
    }
    Ok(u64::from_ne_bytes(bytes))
}

/// IPv4 addresses of this network namespace, with their prefix lengths and devices.
fn addresses() -> Result<Vec<(String, Ipv4Addr, u8)>> {
    let all = nix::ifaddrs::getifaddrs().context("asking for this host's addresses")?;
    Ok(all
        .filter_map(|i| {
            let addr = i.address?.as_sockaddr_in()?.ip();
            let mask = i.netmask?.as_sockaddr_in()?.ip();
            Some((i.interface_name, addr, u32::from(mask).count_ones() as u8))
        })
        .collect())
}

fn prefix((addr, len): (Ipv4Addr, u8)) -> uc_prefix {
    let mask = u32::MAX.checked_shl(32 - u32::from(len)).unwrap_or(0);
    uc_prefix { addr: (u32::from(addr) & mask).to_be(), mask: mask.to_be() }
}

fn settings(options: &Options, memcached: &Memcached) -> Result<uc_settings> {
    let here = addresses()?;
    let anywhere = memcached.udp_addrs.iter().any(Ipv4Addr::is_unspecified);
    let mut listens: Vec<_> =
        here.iter().map(|(_, addr, _)| *addr).filter(|addr| anywhere || memcached.udp_addrs.contains(addr)).collect();
    listens.truncate(UC_ADDRESSES as usize);
    let trusted = if options.trusted.is_empty() {
        here.iter().filter(|(device, ..)| *device == options.device).map(|&(_, addr, len)| (addr, len)).collect()
    } else {
        options.trusted.clone()
    };
    if trusted.len() > UC_ADDRESSES as usize {
        bail!("more than {UC_ADDRESSES} trusted prefixes: join some");
    }
    let mut settings = uc_settings {
        address_count: listens.len() as u32,
        prefix_count: trusted.len() as u32,
        port: memcached.udp_port.to_be(),
        limit: options.limit * MBIT,
        secret: [random()?, random()?],
        ..uc_settings::default()
    };
    for (to, addr) in settings.addresses.iter_mut().zip(listens) {
        *to = u32::from(addr).to_be();
    }
    for (to, trusted) in settings.prefixes.iter_mut().zip(trusted) {
        *to = prefix(trusted);
    }
    Ok(settings)
}

/// What the kernel gives the agent, until that looks at it.
#[derive(Default)]
struct Given {
    reports: RefCell<Vec<uc_report>>,
    stored: RefCell<Vec<uc_stored>>,
}

fn rings(kernel: &Kernel, given: &Rc<Given>) -> Result<RingBuffer<'static>> {
    let (reports, stored) = (kernel.reports(), kernel.stored());
    let mut builder = RingBufferBuilder::new();
    for map in &reports {
        let given = given.clone();
        builder.add(map, move |bytes: &[u8]| {
            assert!(bytes.len() >= size_of::<uc_report>());
            // SAFETY: as many bytes as the structure has; any bytes are a value.
            given.reports.borrow_mut().push(unsafe { bytes.as_ptr().cast::<uc_report>().read_unaligned() });
            0
        })?;
    }
    let given = given.clone();
    builder.add(&stored, move |bytes: &[u8]| {
        assert!(bytes.len() >= size_of::<uc_stored>());
        // SAFETY: as above.
        given.stored.borrow_mut().push(unsafe { bytes.as_ptr().cast::<uc_stored>().read_unaligned() });
        0
    })?;
    builder.build().context("reading the kernel's reports")
}

impl Connection {
    fn new(at: SocketAddrV4, kernel: &Kernel) -> Result<Self> {
        let wait = Duration::from_secs(2);
        let stream =
            TcpStream::connect_timeout(&SocketAddr::V4(at), wait).with_context(|| format!("connecting to {at}"))?;
        let SocketAddr::V4(own) = stream.local_addr()? else { bail!("an IPv4 connection has no IPv4 address") };
        kernel.set_agent(own, at);
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, out: Vec::new(), input: Vec::new(), asked: VecDeque::new() })
    }
}

impl Agent {
    /// Puts a cache in front of a memcached.
    pub fn attach(options: Options, memcached: Memcached) -> Result<Self> {
        let ifindex = interface_index(&options.device)?;
        let pid = Pid::from_raw(memcached.pid).context("memcached's process number")?;
        let alive = rustix::process::pidfd_open(pid, PidfdFlags::empty()).context("watching memcached's process")?;
        let sizes = Sizes::of_budget(options.mib, options.ways as u32);
        let doorkeeper = Doorkeeper::new(sizes.sets as usize * options.ways);
        let mut kernel = Kernel::load(settings(&options, &memcached)?, sizes)?;
        let given = Rc::default();
        let rings = rings(&kernel, &given)?;
        kernel.follow(memcached.pid as u32)?;
        followed(&kernel, memcached.at)?;
        let connection = Connection::new(memcached.at, &kernel)?;
        let table = Table::new(&kernel, options.ways);
        let (to_grace, for_grace) = mpsc::channel::<Vec<u32>>();
        let (freed, from_grace) = mpsc::channel();
        wait_for_programs()?;
        std::thread::Builder::new().name("grace".into()).spawn(move || {
            // Ends with the agent, whose end of the channel it is.
            while let Ok(places) = for_grace.recv() {
                if wait_for_programs().is_err() || freed.send(places).is_err() {
                    return;
                }
            }
        })?;
        // What memcached received before anybody looked it has obeyed by then: else it could change an item after this one
        // asked for it.
        std::thread::sleep(SETTLE);
        let mut agent = Self {
            options,
            memcached,
            alive,
            rings,
            given,
            kernel,
            table,
            connection,
            asked_keys: HashSet::new(),
            refused: HashMap::new(),
            flushes: Vec::new(),
            looked: 0,
            to_grace,
            from_grace,
            in_grace: false,
            counts: Counts::default(),
            buffer: vec![0; BUFFER].into(),
            doorkeeper,
        };
        agent.look_for_flush()?;
        agent.set_serving();
        if let Err(error) = take_short_turns() {
            tracing::debug!("the agent takes turns of ordinary length: {error}");
        }
        agent.kernel.attach(ifindex, agent.options.mode)?;
        Ok(agent)
    }

    /// What it is in front of.
    pub fn memcached(&self) -> &Memcached {
        &self.memcached
    }

    /// What it was started with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The kernel's side.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// The tables.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// What the agent counted.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Ready to be read when memcached has ended.
    pub fn alive(&self) -> BorrowedFd<'_> {
        self.alive.as_fd()
    }

    /// Ready to be read when the kernel reports something.
    pub fn reports(&self) -> i32 {
        self.rings.epoll_fd()
    }

    /// Ready to be read when memcached answers; to be written when there is more to ask.
    pub fn socket(&self) -> (BorrowedFd<'_>, bool) {
        (self.connection.stream.as_fd(), !self.connection.out.is_empty())
    }

    /// Takes the programs off. The rest is of no use afterwards.
    pub fn detach(&mut self) {
        self.kernel.detach();
    }

    /// How long nothing needs to be done for, unless something is ready.
    pub fn pause(&self) -> Duration {
        Duration::from_millis(if self.in_grace { 5 } else { 100 })
    }

    /// Does what there is to do.
    pub fn step(&mut self) -> Result<()> {
        self.rings.consume().context("reading the kernel's reports")?;
        let (stored, reports) = (self.given.stored.take(), self.given.reports.take());
        for stored in &stored {
            self.stored(stored);
        }
        for report in &reports {
            match report.notice {
                UC_NOTICE_FLUSH => self.flush_later(report.hash, report.number),
                // It has woken this up.
                UC_NOTICE_LET_GO => {}
                _ => self.ask(&report.key[..(report.key_len.min(UC_KEY_MAX)) as usize], report.number != 0),
            }
        }
        if self.kernel.let_go() != self.looked
            && let Err(error) = self.look_for_flush()
        {
            tracing::warn!("{error:#}; nothing is served until it is known what is to be flushed");
        }
        self.flushes();
        if let Err(error) = self.talk() {
            self.counts.reconnects += 1;
            tracing::warn!("{error:#}; connecting again");
            self.asked_keys.clear();
            self.connection = Connection::new(self.memcached.at, &self.kernel)?;
        }
        self.grace();
        Ok(())
    }

    /// Asks memcached for what was missed; `numbered`: with the number that `gets` tells.
    fn ask(&mut self, key: &[u8], numbered: bool) {
        let secret = self.kernel.settings().secret;
        let hash = hash::hash(key, &secret);
        if self.kernel.stale() {
            // Reading an item that was marked stale takes away what its next reader is to be told.
            self.counts.refused_stale += 1;
            return;
        }
        if self.connection.asked.len() >= ASKED_MAX {
            self.counts.dropped += 1;
            return;
        }
        if self.refused.get(&hash).is_some_and(|&until| now_ms() < until) || self.asked_keys.contains(key) {
            return;
        }
        // A set has filled it since.
        if self.table.serves(&self.kernel, key, numbered, now_ms()) {
            return;
        }
        if self.table.is_full() && !self.doorkeeper.knows(hash) {
            self.counts.not_admitted += 1;
            return;
        }
        let words = self.words(hash);
        if !words.iter().all(|&word| word::may_ask(word)) {
            self.counts.refused_in_flight += 1;
            return;
        }
        let words = words.map(word::asked);
        self.asked_keys.insert(key.to_vec());
        self.connection.asked.push_back(Asked { key: key.to_vec(), words, at_ms: now_ms() });
        self.connection.out.extend([b"mg ", key, b" v f c t\r\n"].concat());
        self.counts.asked += 1;
    }

    fn words(&self, hash: u64) -> [u64; 2] {
        let set = hash::set(hash, self.kernel.settings().set_mask);
        let word = self.kernel.word(set, hash::which(hash)).load(Ordering::SeqCst);
        [word, self.kernel.global().load(Ordering::SeqCst)]
    }

    /// Sends what there is to ask, takes what was answered.
    fn talk(&mut self) -> Result<()> {
        loop {
            let Connection { stream, out, .. } = &mut self.connection;
            if out.is_empty() {
                break;
            }
            match stream.write(out) {
                Ok(sent) => drop(out.drain(..sent)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context("asking memcached"),
            }
        }
        loop {
            match self.connection.stream.read(&mut self.buffer) {
                Ok(0) => bail!("memcached closed the connection"),
                Ok(got) => self.connection.input.extend_from_slice(&self.buffer[..got]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context("asking memcached"),
            }
        }
        let input = std::mem::take(&mut self.connection.input);
        let mut at = 0;
        while let Some((answer, len)) = parse_answer(&input[at..])? {
            let asked = self.connection.asked.pop_front().context("memcached answers what was not asked")?;
            self.asked_keys.remove(&asked.key);
            self.answered(&asked, answer, &input[at..at + len]);
            at += len;
        }
        self.connection.input = input[at..].to_vec();
        Ok(())
    }

    fn answered(&mut self, asked: &Asked, answer: Answer, bytes: &[u8]) {
        let hash = hash::hash(&asked.key, &self.kernel.settings().secret);
        let Answer::Item { flags, cas, left, value, stale } = answer else {
            match answer {
                Answer::Miss => self.counts.refused_absent += 1,
                _ => self.counts.refused_error += 1,
            }
            return;
        };
        if stale {
            self.counts.refused_stale += 1;
            return self.refuse(hash);
        }
        let deadline_ms = asked.at_ms + life_ms(left);
        let now = self.words(hash);
        if now.map(word::asked) != asked.words {
            match now.iter().all(|&word| word::may_ask(word)) {
                true => self.counts.refused_changed += 1,
                false => self.counts.refused_in_flight += 1,
            }
            return;
        }
        let item = Item { key: &asked.key, flags, cas: Some(cas), value: &bytes[value] };
        // Of this length it never can be.
        if self.install(&item, asked.words, deadline_ms) == Some(Install::TooLarge) {
            self.refuse(hash);
        }
    }

    /// What a set stores, if it does: valid from when memcached has said so.
    fn stored(&mut self, stored: &uc_stored) {
        let key = &stored.key[..(stored.key_len.min(UC_KEY_MAX)) as usize];
        let left = match u64::from(stored.seconds) {
            0 => None,
            left @ 1..=DELAY_MAX_S => Some(left),
            // By the wall's clock, which may be put forward or back: asked for when it is missed.
            _ => return,
        };
        let words = [stored.word, stored.global];
        let now = self.words(hash::hash(key, &self.kernel.settings().secret));
        if (0..2).any(|which| word::generation(now[which]) != word::generation(words[which])) {
            self.counts.refused_changed += 1;
            return;
        }
        let value = &stored.value[..(stored.len as usize).min(stored.value.len())];
        let item = Item { key, flags: stored.flags, cas: None, value };
        if matches!(self.install(&item, words, stored.at_ms + life_ms(left)), Some(Install::Done | Install::Evicted)) {
            self.counts.fills_by_set += 1;
        }
    }

    /// None: it ends too soon.
    fn install(&mut self, item: &Item<'_>, words: [u64; 2], deadline_ms: u64) -> Option<Install> {
        if now_ms() >= deadline_ms {
            self.counts.refused_expiring += 1;
            return None;
        }
        let done = self.table.install(&mut self.kernel, item, words, deadline_ms);
        match done {
            Install::Done => self.counts.fills += 1,
            Install::Evicted => {
                self.counts.fills += 1;
                self.counts.evictions += 1;
            }
            Install::TooLarge => self.counts.refused_too_large += 1,
            Install::NoSlot => self.counts.refused_no_slot += 1,
        }
        Some(done)
    }

    fn refuse(&mut self, hash: u64) {
        if self.refused.len() >= REFUSED_MAX {
            self.refused.clear();
        }
        self.refused.insert(hash, now_ms() + REFUSED_MS);
    }

    /// A `flush_all` that is to take place: nothing is served around then, and everything is forgotten after it. Until this
    /// has been noted the kernel holds the global word.
    fn flush_later(&mut self, asked_ms: u64, number: u64) {
        let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
        let (start_ms, delay) =
            if number > DELAY_MAX_S { (now_ms(), number.saturating_sub(wall)) } else { (asked_ms, number) };
        self.flush_from(start_ms, delay);
        self.kernel.global().fetch_sub(UC_WRITE as u64, Ordering::SeqCst);
    }

    /// A `flush_all` that nobody has seen asked for: before this was attached, or by a connection that is not followed.
    fn look_for_flush(&mut self) -> Result<()> {
        let let_go = self.kernel.let_go();
        let now = now_ms();
        if let Some(delay) = flush_to_come(self.memcached.at).context("asking memcached for its next flush")? {
            self.flush_from(now, delay);
        }
        // One that is over took what was stored until then, whatever the set was answered.
        self.kernel.global().fetch_add(UC_GENERATION, Ordering::SeqCst);
        self.looked = let_go;
        self.kernel.looked(let_go);
        Ok(())
    }

    fn flush_from(&mut self, start_ms: u64, delay: u64) {
        // memcached's clock is cut to whole seconds and up to one old; the program's is up to some ticks behind.
        let from_ms = (start_ms + delay.saturating_sub(2) * 1000).saturating_sub(TICK_MS);
        let flush = Flush { from_ms, to_ms: start_ms + (delay + 3) * 1000 };
        if self.flushes.len() >= FLUSHES_MAX {
            let last = self.flushes.last_mut().expect("there are some");
            *last = Flush { from_ms: last.from_ms.min(flush.from_ms), to_ms: last.to_ms.max(flush.to_ms) };
        } else {
            self.flushes.push(flush);
        }
        self.set_serving();
    }

    fn flushes(&mut self) {
        let now = now_ms();
        if self.flushes.iter().any(|flush| now >= flush.to_ms) {
            self.flushes.retain(|flush| now < flush.to_ms);
            self.kernel.global().fetch_add(UC_GENERATION, Ordering::SeqCst);
            self.set_serving();
        }
    }

    fn set_serving(&self) {
        self.kernel.serve_until(self.flushes.iter().map(|flush| flush.from_ms).min().unwrap_or(u64::MAX));
    }

    /// Slots that no way shows may be used again once program runs have ended.
    fn grace(&mut self) {
        while let Ok(places) = self.from_grace.try_recv() {
            self.table.freed(&places);
            self.in_grace = false;
        }
        if !self.in_grace {
            let places = self.table.waiting();
            self.in_grace = !places.is_empty() && self.to_grace.send(places).is_ok();
        }
    }
}

/// How long an item is served that memcached gives so many seconds; none: no end.
fn life_ms(left: Option<u64>) -> u64 {
    left.map_or(AGE_MAX_MS, |left| {
        AGE_MAX_MS.min((left.saturating_sub(u64::from(SLACK)) * 1000).saturating_sub(TICK_MS))
    })
}

/// Lets this thread run soon after it is woken, and not for long: until it has filled what was missed, every reader misses it.
/// Linux 6.12 heeds that; those before take no notice.
fn take_short_turns() -> std::io::Result<()> {
    let done = |result| if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) };
    // SAFETY: plain data for which all zeros is valid.
    let mut now: libc::sched_attr = unsafe { std::mem::zeroed() };
    let size = size_of_val(&now) as u32;
    // SAFETY: the kernel writes at most so many bytes, there.
    done(unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut now, size, 0) })?;
    now.sched_runtime = TURN.as_nanos() as u64;
    // SAFETY: the kernel reads what it wrote.
    done(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const now, 0) })
}

/// Whether the kernel's programs see what memcached is sent: they know its process by a number that another PID namespace
/// may have given to another.
fn followed(kernel: &Kernel, at: SocketAddrV4) -> Result<()> {
    let others = || -> Result<u64> { Ok(kernel.counters()?.iter().map(|cpu| cpu[UC_COUNT_OTHER as usize]).sum()) };
    let before = others()?;
    let mut stream = TcpStream::connect_timeout(&SocketAddr::V4(at), Duration::from_secs(2))?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    stream.write_all(b"mn\r\n")?;
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).context("memcached does not answer")?;
    if others()? == before {
        bail!("what memcached is sent is not seen by the kernel's programs: run this in the host's own PID namespace");
    }
    Ok(())
}
