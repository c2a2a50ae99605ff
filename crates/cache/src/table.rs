//! What the agent does with the directory and the slots: it alone installs, evicts and frees.
//!
//! Pages are given to size classes and cut into slots. A slot that a way shows is not written; one that a way showed is used
//! again only after every program run has ended that may have seen it ([`Table::freed`]).

use std::sync::atomic::Ordering;

use underpass_abi::cache::{
    UC_ANSWER_MAX, UC_HEAD_MAX, UC_PAGE, UC_SLOT_HEAD, UC_SLOT_MAX, UC_UNIT, UC_UNIT_BITS, UC_WAYS, uc_slot,
};

use crate::{
    hash,
    kernel::{Kernel, PUBLISH},
    word,
};

/// Slot sizes, in bytes.
pub const CLASSES: [u32; 12] =
    [128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, UC_SLOT_MAX.next_multiple_of(64)];
/// Slots looked at for one that may be evicted.
const LOOK_MAX: usize = 64;

/// An item as memcached told it, or as a set stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item<'a> {
    /// Its key.
    pub key: &'a [u8],
    /// Client flags.
    pub flags: u32,
    /// CAS number; none: it comes from a set, and memcached's number is not known.
    pub cas: Option<u64>,
    /// Its value.
    pub value: &'a [u8],
}

/// What came of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Install {
    /// It is served.
    Done,
    /// It is, and another one no more.
    Evicted,
    /// It is too large for a datagram.
    TooLarge,
    /// There is no slot for it just now.
    NoSlot,
}

#[derive(Default)]
struct Page {
    class: usize,
    /// For each slot: 1 + (set * `UC_WAYS` + way); 0: none shows it.
    owners: Vec<u32>,
    /// It is to change its class: slots that are to be freed until then.
    leaves: Option<usize>,
}

#[derive(Default)]
struct Class {
    pages: Vec<u32>,
    free: Vec<u32>,
    /// Where to look for one to evict: index into `pages`, and slot.
    hand: (usize, u32),
}

/// The agent's account of the tables.
pub struct Table {
    ways: usize,
    pages: Vec<Page>,
    /// Pages of no class yet.
    free_pages: Vec<u32>,
    classes: [Class; CLASSES.len()],
    /// Slots that no way shows any more.
    quarantine: Vec<u32>,
    entries: u64,
}

impl Table {
    /// Empty tables.
    pub fn new(kernel: &Kernel, ways: usize) -> Self {
        assert!((1..=UC_WAYS as usize).contains(&ways));
        let pages = kernel.sizes().pages;
        Self {
            ways,
            pages: (0..pages).map(|_| Page::default()).collect(),
            // Page 0 is not used, so that no place is 0.
            free_pages: (1..pages).rev().collect(),
            classes: Default::default(),
            quarantine: Vec::new(),
            entries: 0,
        }
    }

    /// Items that ways show.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Pages in use, and in all.
    pub fn pages(&self) -> (usize, usize) {
        let all = self.pages.len() - 1;
        (all - self.free_pages.len(), all)
    }

    /// Whether another item takes the place of one that is there.
    pub fn is_full(&self) -> bool {
        self.free_pages.is_empty()
    }

    /// Slots that wait for program runs to end.
    pub fn waiting(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.quarantine)
    }

    /// Program runs have ended: these may be used again.
    pub fn freed(&mut self, places: &[u32]) {
        for &place in places {
            let at = place >> UC_UNIT_BITS;
            let page = &mut self.pages[at as usize];
            match &mut page.leaves {
                None => self.classes[page.class].free.push(place),
                Some(slots) => {
                    *slots -= 1;
                    if *slots == 0 {
                        self.free_pages.push(at);
                    }
                }
            }
        }
    }

    /// Shows an item, asked for while the words were `words`.
    pub fn install(&mut self, kernel: &mut Kernel, item: &Item<'_>, words: [u64; 2], deadline_ms: u64) -> Install {
        let Some((head, bytes)) = render(item, words, deadline_ms) else { return Install::TooLarge };
        let hash = hash::hash(item.key, &kernel.settings().secret);
        let set = hash::set(hash, kernel.settings().set_mask);
        let Some((place, evicted)) = self.take_slot(kernel, bytes.len() + UC_SLOT_HEAD as usize) else {
            return Install::NoSlot;
        };
        kernel.write_slot(place, &head, &bytes);
        let (way, crowded) = self.choose_way(kernel, set, hash, item.key);
        self.clear(kernel, set, way);
        self.own(place, (set * UC_WAYS as usize + way) as u32 + 1);
        self.entries += 1;
        kernel.way(set, way).store(u64::from(hash::tag(hash)) << 32 | u64::from(place), PUBLISH);
        if evicted || crowded { Install::Evicted } else { Install::Done }
    }

    /// Whether a key is served; `numbered`: to `gets`, too.
    pub fn serves(&self, kernel: &Kernel, key: &[u8], numbered: bool, now_ms: u64) -> bool {
        let hash = hash::hash(key, &kernel.settings().secret);
        let set = hash::set(hash, kernel.settings().set_mask);
        (0..self.ways).map(|way| kernel.way(set, way).load(Ordering::Relaxed)).any(|way| {
            shows(kernel, way, hash, key) && self.valid(kernel, way) && {
                let slot = kernel.slot(way as u32);
                slot.deadline_ms > now_ms && (slot.cas_len > 0 || !numbered)
            }
        })
    }

    /// Shows nothing any more; for when memcached is another one.
    pub fn clear_all(&mut self, kernel: &Kernel) {
        for set in 0..kernel.sizes().sets as usize {
            for way in 0..self.ways {
                self.clear(kernel, set, way);
            }
        }
    }

    /// The way that an item goes into: its own, a free one, one that is not valid any more, or one not used of late. And
    /// whether a valid item loses it.
    fn choose_way(&self, kernel: &Kernel, set: usize, hash: u64, key: &[u8]) -> (usize, bool) {
        let shown: Vec<u64> = (0..self.ways).map(|way| kernel.way(set, way).load(Ordering::Relaxed)).collect();
        if let Some(way) = shown.iter().position(|&way| shows(kernel, way, hash, key)) {
            return (way, false);
        }
        if let Some(way) = shown.iter().position(|&way| way == 0 || !self.valid(kernel, way)) {
            return (way, false);
        }
        if let Some(way) = shown.iter().position(|&way| kernel.used(way as u32).load(Ordering::Relaxed) == 0) {
            return (way, true);
        }
        for &way in &shown {
            kernel.used(way as u32).store(0, Ordering::Relaxed);
        }
        // Any bits of the hash that choose neither set nor word.
        ((hash >> 40) as usize % self.ways, true)
    }

    fn valid(&self, kernel: &Kernel, way: u64) -> bool {
        let slot = kernel.slot(way as u32);
        let owner = self.owner(way as u32);
        if owner == 0 || slot.global != word::asked(kernel.global().load(Ordering::Relaxed)) {
            return false;
        }
        let set = (owner - 1) as usize / UC_WAYS as usize;
        slot.word == word::asked(kernel.word(set, hash::which(way)).load(Ordering::Relaxed))
    }

    fn take_slot(&mut self, kernel: &Kernel, bytes: usize) -> Option<(u32, bool)> {
        let class = CLASSES.iter().position(|&size| bytes <= size as usize)?;
        if let Some(place) = self.classes[class].free.pop() {
            return Some((place, false));
        }
        if let Some(page) = self.free_pages.pop() {
            self.give(page, class);
            return self.classes[class].free.pop().map(|place| (place, false));
        }
        // What is freed now is of use after program runs have ended; so a few at once.
        let evicted = self.evict(kernel, class, 16);
        if evicted == 0 {
            self.take_page(kernel);
        }
        None
    }

    /// Empties a page of the class that has most; when its slots may be used again it goes to whom it is given.
    fn take_page(&mut self, kernel: &Kernel) {
        let rich = (0..CLASSES.len()).max_by_key(|&class| self.classes[class].pages.len()).expect("there are classes");
        let Some(page) = self.classes[rich].pages.pop() else { return };
        let free = self.classes[rich].free.len();
        self.classes[rich].free.retain(|place| place >> UC_UNIT_BITS != page);
        let all = self.pages[page as usize].owners.len();
        let busy = all - (free - self.classes[rich].free.len());
        if busy == 0 {
            self.free_pages.push(page);
            return;
        }
        self.pages[page as usize].leaves = Some(busy);
        for slot in 0..all {
            let owner = self.pages[page as usize].owners[slot];
            if owner != 0 {
                let at = (owner - 1) as usize;
                self.clear(kernel, at / UC_WAYS as usize, at % UC_WAYS as usize);
            }
        }
    }

    /// Cuts a page into slots of a class.
    fn give(&mut self, page: u32, class: usize) {
        let size = CLASSES[class];
        let count = (UC_PAGE - UC_SLOT_MAX) / size + 1;
        let first = page << UC_UNIT_BITS;
        self.pages[page as usize] = Page { class, owners: vec![0; count as usize], leaves: None };
        self.classes[class].pages.push(page);
        self.classes[class].free.extend((0..count).map(|slot| first + slot * size / UC_UNIT));
    }

    fn evict(&mut self, kernel: &Kernel, class: usize, wanted: usize) -> usize {
        let mut evicted = 0;
        for _ in 0..LOOK_MAX * 4 {
            let Class { pages, hand, .. } = &mut self.classes[class];
            if pages.is_empty() || evicted == wanted {
                break;
            }
            let page = pages[hand.0 % pages.len()];
            let count = self.pages[page as usize].owners.len() as u32;
            let slot = hand.1;
            *hand = if slot + 1 < count { (hand.0, slot + 1) } else { ((hand.0 + 1) % pages.len(), 0) };
            let place = (page << UC_UNIT_BITS) + slot * CLASSES[class] / UC_UNIT;
            let owner = self.pages[page as usize].owners[slot as usize];
            if owner == 0 {
                continue;
            }
            let (set, way) = ((owner - 1) as usize / UC_WAYS as usize, (owner - 1) as usize % UC_WAYS as usize);
            let shown = kernel.way(set, way).load(Ordering::Relaxed);
            if self.valid(kernel, shown) && kernel.used(place).swap(0, Ordering::Relaxed) != 0 {
                continue;
            }
            self.clear(kernel, set, way);
            evicted += 1;
        }
        evicted
    }

    fn clear(&mut self, kernel: &Kernel, set: usize, way: usize) {
        let shown = kernel.way(set, way).swap(0, PUBLISH);
        if shown != 0 {
            self.own(shown as u32, 0);
            self.quarantine.push(shown as u32);
            self.entries -= 1;
        }
    }

    fn slot_index(&self, place: u32) -> (usize, usize) {
        let page = (place >> UC_UNIT_BITS) as usize;
        let unit = place & ((1 << UC_UNIT_BITS) - 1);
        (page, (unit * UC_UNIT / CLASSES[self.pages[page].class]) as usize)
    }

    fn owner(&self, place: u32) -> u32 {
        let (page, slot) = self.slot_index(place);
        self.pages[page].owners[slot]
    }

    fn own(&mut self, place: u32, owner: u32) {
        let (page, slot) = self.slot_index(place);
        self.pages[page].owners[slot] = owner;
    }
}

/// Whether a way shows this key.
fn shows(kernel: &Kernel, way: u64, hash: u64, key: &[u8]) -> bool {
    way != 0
        && (way >> 32) as u32 == hash::tag(hash)
        && usize::from(kernel.slot(way as u32).key_len) == key.len()
        && kernel.slot_bytes(way as u32, 6 + key.len())[6..] == *key
}

/// The Internet checksum's sum over bytes, folded, in memory order.
fn sum(bytes: &[u8]) -> u16 {
    let mut sum = 0u64;
    for pair in bytes.chunks(2) {
        sum += u64::from(u16::from_ne_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
    }
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// A slot's head and bytes; none: it is too large for a datagram.
fn render(item: &Item<'_>, words: [u64; 2], deadline_ms: u64) -> Option<(uc_slot, Vec<u8>)> {
    let mut bytes = [b"VALUE ", item.key, format!(" {} {}", item.flags, item.value.len()).as_bytes()].concat();
    let head_len = bytes.len();
    assert!(head_len <= UC_HEAD_MAX as usize);
    bytes.extend_from_slice(b"\r\n");
    bytes.extend_from_slice(item.value);
    bytes.extend_from_slice(b"\r\n");
    let cas = item.cas.map_or(String::new(), |cas| format!(" {cas}"));
    if bytes.len() + cas.len() + b"END\r\n".len() > UC_ANSWER_MAX as usize {
        return None;
    }
    let mut head = uc_slot {
        word: words[0],
        global: words[1],
        deadline_ms,
        // That a set was seen does not tell that anybody reads it.
        used: item.cas.is_some().into(),
        key_len: item.key.len() as u16,
        head_len: head_len as u16,
        tail_len: (bytes.len() - head_len) as u16,
        head_sum: sum(&bytes[..head_len]),
        cas_sum: sum(cas.as_bytes()),
        tail_sum: sum(&bytes[head_len..]),
        cas_len: cas.len() as u8,
        ..uc_slot::default()
    };
    head.cas[..cas.len()].copy_from_slice(cas.as_bytes());
    Some((head, bytes))
}
