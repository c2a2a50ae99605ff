//! Streams of commands: what clients do to a server, step by step, made from templates and from seeds.

use std::time::Duration;

use rand::{Rng, SeedableRng, rngs::SmallRng, seq::IndexedRandom};

use crate::wire::{BINARY_CAS, Binary, KEY_MAX, TEXT_CAS, base64, datagram, line, meta_set, opcode, store};

/// What an item is before a template is applied to it: a number that stays as long when a little is added or taken.
pub const INITIAL: &[u8] = b"5000000";
/// And its flags.
pub const INITIAL_FLAGS: u32 = 3;

/// How a client speaks on a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Speech {
    /// The text and meta protocols.
    Text,
    /// The binary protocol.
    Binary,
}

/// What follows when a client has sent something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// It sends a barrier and waits for its answer: everything before was processed then.
    Barrier,
    /// It goes on to something else; its connection stays as it is, maybe in the middle of a command.
    Silence,
    /// It sends no more and reads to the end.
    Close,
}

/// One step of a stream.
#[derive(Clone, Debug)]
pub enum Step {
    /// Sends `pieces` on a TCP connection, opened when first used, with a pause between them.
    Send {
        /// Which connection.
        connection: (Speech, u8),
        /// What is sent, in order.
        pieces: Vec<Vec<u8>>,
        /// What then.
        after: After,
    },
    /// Sends one datagram, header included, and takes what comes back. `sentinel`: up to the answer of another one sent after
    /// it, as this one may have no answer, or several; else up to the last datagram of the one answer that it has.
    Datagram {
        /// Header and text.
        bytes: Vec<u8>,
        /// How its answer's end is known.
        sentinel: bool,
    },
    /// Reads a key over UDP a few times with pauses, so that a cache takes it up.
    Warm(Vec<u8>),
    /// Reads a key's cas unique over UDP: it takes the place of the next placeholders.
    Learn(Vec<u8>),
    /// Lets time pass.
    Sleep(Duration),
}

/// What clients do, step by step.
#[derive(Clone, Debug)]
pub struct Stream {
    /// For messages.
    pub name: String,
    /// In order.
    pub steps: Vec<Step>,
}

/// How a template reaches the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Over TCP.
    Tcp(Speech),
    /// In a datagram.
    Udp,
}

type Make = Box<dyn Fn(&[u8]) -> Vec<u8> + Send + Sync>;

/// A command that may change an item, made for a key.
pub struct Template {
    /// For messages: the command with its peculiarity.
    pub name: String,
    /// How it is spoken.
    pub speech: Speech,
    make: Make,
}

impl Template {
    /// Whether it may leave an item that readers are told to replace.
    pub fn marks_stale(&self) -> bool {
        self.name.starts_with('m') && self.name.split(' ').any(|flag| flag == "I")
    }

    /// The command for this key.
    pub fn request(&self, key: &[u8]) -> Vec<u8> {
        (self.make)(key)
    }
}

/// Every command that can change an item, or looks past a cache, in its forms. Those that mark items stale come last: a cache may
/// be of no use afterwards.
pub fn templates() -> Vec<Template> {
    let mut all = Vec::new();
    text_templates(&mut all);
    meta_templates(&mut all);
    binary_templates(&mut all);
    all.sort_by_key(Template::marks_stale);
    all
}

fn text_templates(all: &mut Vec<Template>) {
    let mut add = |name: &str, make: Make| all.push(Template { name: name.into(), speech: Speech::Text, make });
    for verb in ["set", "add", "replace", "append", "prepend"] {
        for end in ["", " noreply"] {
            add(&format!("{verb}{end}"), Box::new(move |key| store(verb, key, 5, 0, b"123", end)));
        }
    }
    for (name, value) in
        [("set of lines", &b"a\r\nget x\r\nb"[..]), ("set of nothing", b""), ("set of END", b"END\r\n")]
    {
        add(name, Box::new(move |key| store("set", key, 0, 0, value, "")));
    }
    add("set of a long value", Box::new(|key| store("set", key, 0, 0, &[b'v'; 3000], "")));
    add("set that ends at once", Box::new(|key| store("set", key, 0, -1, b"gone", "")));
    add("set for a long time", Box::new(|key| store("set", key, 0, 1000, b"kept", "")));
    add("set with spaces", Box::new(|key| [b"  set   ", key, b"  1 0  2 \r\nab\r\n"].concat()));
    add("set without CR", Box::new(|key| [b"set ", key, b" 1 0 2\nab\r\n"].concat()));
    for end in ["", " noreply"] {
        let cas = std::str::from_utf8(TEXT_CAS).expect("ASCII");
        add(&format!("cas{end}"), Box::new(move |key| store_cas(key, cas, end)));
        add(&format!("cas of an old version{end}"), Box::new(move |key| store_cas(key, "1", end)));
        for (verb, rest) in
            [("incr", " 7"), ("decr", " 7"), ("touch", " 1000"), ("touch", " -1"), ("delete", ""), ("delete", " 0")]
        {
            add(&format!("{verb}{rest}{end}"), Box::new(move |key| line(verb, key, &format!("{rest}{end}"))));
        }
        for name in ["flush_all", "flush_all 0", "flush_all -1", "flush_all 1000", "verbosity 0"] {
            add(&format!("{name}{end}"), Box::new(move |_| format!("{name}{end}\r\n").into_bytes()));
        }
    }
    for verb in ["gat", "gats"] {
        for lifetime in ["0", "1000", "-1"] {
            let start = format!("{verb} {lifetime}");
            add(&start.clone(), Box::new(move |key| line(&start, key, "")));
        }
    }
    add("gat of several", Box::new(|key| line("gat -1 absent", key, " absent")));
    add("delete without CR", Box::new(|key| [b"delete ", key, b"\n"].concat()));
    add("get", Box::new(|key| line("get", key, "")));
    add("gets of several", Box::new(|key| line("gets absent", key, " absent")));
}

fn store_cas(key: &[u8], cas: &str, end: &str) -> Vec<u8> {
    let mut out = line("cas", key, &format!(" 5 0 3 {cas}{end}"));
    out.extend(b"xyz\r\n");
    out
}

fn meta_templates(all: &mut Vec<Template>) {
    let mut add = |name: String, make: Make| all.push(Template { name, speech: Speech::Text, make });
    for mode in ["", " ME", " MA", " MP", " MR", " MS", " mset"] {
        for flags in [" c", " q", " T1000 F9 k O123"] {
            let flags = format!("{mode}{flags}");
            add(format!("ms{flags}"), Box::new(move |key| meta_set(key, b"321", &flags)));
        }
    }
    let cas = std::str::from_utf8(TEXT_CAS).expect("ASCII");
    for flags in [format!(" C{cas}"), format!(" C{cas} q"), " C1".into(), " C1 I".into(), " I".into(), " T-1".into()] {
        add(format!("ms{flags}"), Box::new(move |key| meta_set(key, b"321", &flags)));
    }
    add("ms of base64".into(), Box::new(|key| meta_set(&base64(key), b"321", " b")));
    for flags in ["", " q", " I", " I T1000", " T-1", " k O7", " C1"] {
        add(format!("md{flags}"), Box::new(move |key| line("md", key, flags)));
    }
    add("md of base64".into(), Box::new(|key| line("md", &base64(key), " b q")));
    for flags in ["", " v", " q", " MD", " M- D5 v", " D3 q", " T-1", " N0 J13 v", " C1", " t v c"] {
        add(format!("ma{flags}"), Box::new(move |key| line("ma", key, flags)));
    }
    for flags in [" v", " v T1000", " T-1", " v c f k s O9", " v q", " N30 v", " R1000 v", " t", " u v", " E"] {
        add(format!("mg{flags}"), Box::new(move |key| line("mg", key, flags)));
    }
    add("mg of base64".into(), Box::new(|key| line("mg", &base64(key), " b v k T1000")));
}

fn binary_templates(all: &mut Vec<Template>) {
    use opcode::*;
    let mut add = |name: String, make: Make| all.push(Template { name, speech: Speech::Binary, make });
    for (name, opcode) in [("set", SET), ("add", ADD), ("replace", REPLACE), ("setq", SETQ), ("addq", ADDQ)] {
        for (what, cas) in [("", 0), (", cas", BINARY_CAS), (", old cas", 1)] {
            add(
                format!("binary {name}{what}"),
                Box::new(move |key| Binary::new(opcode, key).extras(&[8, 0]).value(b"123").cas(cas).bytes()),
            );
        }
    }
    add("binary replaceq".into(), Box::new(|key| Binary::new(REPLACEQ, key).extras(&[8, 0]).value(b"1").bytes()));
    for (name, opcode) in [("append", APPEND), ("prepend", PREPEND), ("appendq", APPENDQ), ("prependq", PREPENDQ)] {
        add(format!("binary {name}"), Box::new(move |key| Binary::new(opcode, key).value(b"77").bytes()));
    }
    for (name, opcode) in
        [("increment", INCREMENT), ("decrement", DECREMENT), ("incrementq", INCREMENTQ), ("decrementq", DECREMENTQ)]
    {
        add(format!("binary {name}"), Box::new(move |key| Binary::new(opcode, key).amount(7, 1, u32::MAX).bytes()));
    }
    for (name, opcode) in [("delete", DELETE), ("deleteq", DELETEQ)] {
        for (what, cas) in [("", 0), (", cas", BINARY_CAS), (", old cas", 1)] {
            add(format!("binary {name}{what}"), Box::new(move |key| Binary::new(opcode, key).cas(cas).bytes()));
        }
    }
    for (name, opcode) in [("touch", TOUCH), ("gat", GAT), ("gatq", GATQ), ("gatk", GATK), ("gatkq", GATKQ)] {
        // The last one is a day of 2001: over at once.
        for lifetime in [0, 1000, 1_000_000_000] {
            add(
                format!("binary {name} {lifetime}"),
                Box::new(move |key| Binary::new(opcode, key).extras(&[lifetime]).bytes()),
            );
        }
    }
    for (name, opcode) in [("flush", FLUSH), ("flushq", FLUSHQ)] {
        add(format!("binary {name}"), Box::new(move |_| Binary::new(opcode, b"").bytes()));
        add(format!("binary {name} 0"), Box::new(move |_| Binary::new(opcode, b"").extras(&[0]).bytes()));
    }
    for (name, opcode) in [("get", GET), ("getq", GETQ), ("getk", GETK), ("getkq", GETKQ)] {
        add(format!("binary {name}"), Box::new(move |key| Binary::new(opcode, key).bytes()));
    }
}

fn get(verb: &str, keys: &[&[u8]]) -> Step {
    let mut text = verb.as_bytes().to_vec();
    for key in keys {
        text.push(b' ');
        text.extend(*key);
    }
    text.extend(b"\r\n");
    // The runner gives it a number of its own. memcached answers several keys in several datagrams, each called the only one.
    Step::Datagram { bytes: datagram(0, &text), sentinel: keys.len() > 1 }
}

fn send(speech: Speech, number: u8, pieces: Vec<Vec<u8>>, after: After) -> Step {
    Step::Send { connection: (speech, number), pieces, after }
}

/// An item is stored and read until a cache has it; the template is applied to it, whole, cut in two at every place, in
/// single bytes, behind another command, and twice at once; each time all ways of reading see what is there afterwards.
pub fn directed(template: &Template, way: Way, prefix: &str) -> Stream {
    let length = template.request(b"directed-key-0000").len();
    // Of a datagram there is one form only, so that is sent a few times.
    let mut forms: Vec<Vec<usize>> = vec![Vec::new(); if way == Way::Udp { 5 } else { 1 }];
    if let Way::Tcp(_) = way {
        // Long values are all alike in the middle.
        forms.extend((1..length).filter(|&at| at < 200 || at + 20 > length || at % 500 == 0).map(|at| vec![at]));
        forms.push((1..length.min(200)).collect());
    }
    let mut steps = Vec::new();
    for (number, cuts) in forms.iter().enumerate() {
        let key = format!("{prefix}-{number:05}");
        apply(template, way, key.as_bytes(), cuts, 1, &mut steps);
    }
    if let Way::Tcp(_) = way {
        for (number, times) in [(90_000, 2), (90_001, 5)] {
            let key = format!("{prefix}-{number}");
            apply(template, way, key.as_bytes(), &[], times, &mut steps);
        }
    }
    Stream { name: format!("{} by {way:?}", template.name), steps }
}

fn apply(template: &Template, way: Way, key: &[u8], cuts: &[usize], times: usize, steps: &mut Vec<Step>) {
    let stored = store("set", key, INITIAL_FLAGS, 0, INITIAL, "");
    steps.push(send(Speech::Text, 0, vec![stored], After::Barrier));
    steps.push(Step::Warm(key.to_vec()));
    steps.push(Step::Learn(key.to_vec()));
    let request = template.request(key).repeat(times);
    match way {
        Way::Udp => steps.push(Step::Datagram { bytes: datagram(0, &request), sentinel: true }),
        Way::Tcp(speech) => steps.push(send(speech, 1, cut(&request, cuts), After::Barrier)),
    }
    steps.push(get("get", &[key]));
    steps.push(get("gets", &[key]));
    steps.push(Step::Warm(key.to_vec()));
    let other = [b"other", &key[1..]].concat();
    steps.push(send(Speech::Text, 0, vec![store("set", &other, 0, 0, b"not read", "")], After::Barrier));
    steps.push(get("gets", &[key, &other, b"absent", key]));
    steps.push(send(Speech::Text, 2, vec![line("gets", key, "")], After::Barrier));
}

fn cut(bytes: &[u8], at: &[usize]) -> Vec<Vec<u8>> {
    let mut from = 0;
    let mut pieces: Vec<Vec<u8>> = Vec::new();
    for &to in at.iter().filter(|&&to| to < bytes.len()) {
        pieces.push(bytes[from..to].to_vec());
        from = to;
    }
    pieces.push(bytes[from..].to_vec());
    pieces
}

/// What no client should send: bytes, and whether the connection can still be spoken on afterwards. `key` names an item.
pub fn bad_text(key: &[u8]) -> Vec<(Vec<u8>, After)> {
    let long = vec![b'k'; KEY_MAX + 1];
    let mut all = Vec::new();
    for verb in ["get", "gets", "delete", "incr", "touch", "gat 0", "mg", "md", "ma"] {
        all.push((line(verb, &long, ""), After::Barrier));
        all.push((format!("{verb}\r\n").into_bytes(), After::Barrier));
    }
    for verb in ["set", "add", "append"] {
        all.push((store(verb, &long, 0, 0, b"abc", ""), After::Barrier));
        all.push((store(verb, key, 0, 0, b"abc", " noreplyx"), After::Barrier));
    }
    all.push((meta_set(&long, b"abc", ""), After::Barrier));
    for rest in [" 0 0", " 0 0 -1", " 0 0 x", " x 0 3", " 0 x 3", "", " 0 0 3 4 5 6", " 4294967296 0 3"] {
        all.push((line("set", key, rest), After::Barrier));
        all.push((line("cas", key, rest), After::Barrier));
    }
    for rest in [" x", " -1", " 18446744073709551616", ""] {
        all.push((line("incr", key, rest), After::Barrier));
        all.push((line("touch", key, rest), After::Barrier));
    }
    for rest in [" !", " v v", " T", " Tx", " N", " Mx", " Cx", " O", " S3"] {
        for verb in ["mg", "md", "ma", "ms"] {
            all.push((line(verb, key, rest), After::Barrier));
        }
    }
    for words in ["SET k 0 0 1", "Get k", "\r", "", "   ", "\0", "bogus", "flush_all x", "delete k 5", "get\tk"] {
        all.push((format!("{words}\r\n").into_bytes(), After::Barrier));
    }
    // More than was announced; less, so that what follows is taken for the value; values without an end.
    all.push(([b"set ", key, b" 0 0 3\r\nabcd\r\n"].concat(), After::Barrier));
    all.push(([b"set ", key, b" 0 0 3\r\nabcdelete x\r\n"].concat(), After::Barrier));
    all.push(([b"set ", key, b" 0 0 40\r\nabc\r\ndelete ", key, b"\r\n"].concat(), After::Close));
    all.push(([b"set ", key, b" 0 0 40\r\nabc"].concat(), After::Silence));
    all.push(([b"ms ", key, b" 9\r\nabc"].concat(), After::Silence));
    all.push((line("delete", key, " ")[..6 + key.len()].to_vec(), After::Silence));
    all.push((line("set", key, " 0 0 2147483647"), After::Silence));
    // Larger than an item may be: the old one goes all the same.
    all.push((store("set", key, 0, 0, &vec![b'v'; (1 << 20) + 100], ""), After::Barrier));
    all.push((vec![b'x'; 5000], After::Close));
    all.push((["get", &" k".repeat(300), "\r\n"].concat().into_bytes(), After::Barrier));
    all
}

/// The same in the binary protocol.
pub fn bad_binary(key: &[u8]) -> Vec<(Vec<u8>, After)> {
    use opcode::*;
    let mut all = Vec::new();
    let long = vec![b'k'; KEY_MAX + 1];
    let set = || Binary::new(SET, key).extras(&[0, 0]).value(b"abc");
    for opcode in [GET, DELETE, TOUCH] {
        all.push((Binary::new(opcode, &long).bytes(), After::Close));
        all.push((Binary::new(opcode, b"").bytes(), After::Close));
    }
    all.push((Binary { key: long, ..set() }.bytes(), After::Close));
    for opcode in [GET, DELETE, SET, INCREMENT, FLUSH, APPEND, TOUCH, GAT, NOOP, VERSION] {
        // Extras that do not belong there.
        all.push((Binary::new(opcode, key).extras(&[1, 2, 3]).value(b"v").bytes(), After::Close));
    }
    let mut short = set().bytes();
    short[11] = 2; // body shorter than key and extras
    all.push((short, After::Close));
    let mut longer = set().bytes();
    longer[11] += 30;
    all.push((longer.clone(), After::Silence));
    all.push((longer, After::Close));
    let mut magic = set().bytes();
    magic.extend(b"delete x\r\n");
    all.push((magic, After::Close));
    all.push((set().bytes()[..30].to_vec(), After::Silence));
    for opcode in [0x0f, 0x1b, 0x25, 0x40, 0xff] {
        all.push((Binary::new(opcode, key).bytes(), After::Close));
    }
    all.push((Binary::new(SET, key).extras(&[0, 0]).value(&vec![b'v'; (1 << 20) + 100]).bytes(), After::Barrier));
    all
}

/// Datagrams that no client should send. None leaves a value unfinished: memcached would take the next datagrams of
/// whomever for the rest.
pub fn bad_datagrams(key: &[u8]) -> Vec<Vec<u8>> {
    let get = line("get", key, "");
    let with = |header: [u8; 8], text: &[u8]| [&header[..], text].concat();
    let mut all = vec![
        Vec::new(),
        vec![0; 7],
        vec![0, 1, 0, 0, 0, 1, 0, 0],
        with([0, 1, 0, 0, 0, 2, 0, 0], &get),
        with([0, 1, 0, 1, 0, 2, 0, 0], &get),
        with([0, 1, 0, 0, 0, 0, 0, 0], &get),
        with([0, 1, 0, 0, 1, 1, 0, 0], &get),
        // Not looked at by memcached.
        with([0, 1, 0, 7, 0, 1, 0, 0], &get),
        with([0, 1, 0, 0, 0, 1, 9, 9], &get),
    ];
    let one = [0, 1, 0, 0, 0, 1, 0, 0];
    for text in [&b"get"[..], b"get\r\n", b"get ", b"\r\n", b"\n", b"bogus\r\n", b"GET x\r\n", b"get \x80\x81\r\n"] {
        all.push(with(one, text));
    }
    all.push(with(one, &get[..get.len() - 2]));
    all.push(with(one, &get[..get.len() - 1]));
    all.push(with(one, &[&get[..get.len() - 2], b"\n"].concat()));
    all.push(with(one, &get.repeat(3)));
    all.push(with(one, &[&get[..], b"delete ", key, b"\r\n"].concat()));
    all.push(with(one, &[&get[..], b"get x"].concat()));
    all.push(with(one, &line("get", &[b'k'; KEY_MAX + 1], "")));
    all.push(with(one, &line("get", &[b'k'; KEY_MAX], "")));
    all.push(with(one, &line(" get ", key, "  ")));
    all.push(with(one, &line("get", key, "\0")));
    all.push(with(one, &Binary::new(opcode::GET, key).bytes()));
    all.push(with(one, &[0xff; 64]));
    all
}

/// Keys of one stream, of all kinds of lengths.
fn keys(prefix: &str, random: &mut SmallRng) -> Vec<Vec<u8>> {
    let mut keys: Vec<Vec<u8>> = (0..8)
        .map(|number| {
            let mut key = format!("{prefix}.{number}").into_bytes();
            let more = *[0, 0, random.random_range(0..48), 64].choose(random).expect("not empty");
            key.resize(key.len() + more, b'_');
            key
        })
        .collect();
    let mut longest = format!("{prefix}.l").into_bytes();
    longest.resize(KEY_MAX, b'k');
    keys.push(longest);
    keys.push(format!("{prefix}.\u{e9}\u{1F40D}").into_bytes());
    keys
}

fn value(random: &mut SmallRng) -> Vec<u8> {
    // Numbers that stay as long as they are: one that gets shorter is padded, or not, as memcached happens to hold it.
    const SOME: &[&[u8]] = &[b"\r\n.", b"500000041", b"499999999", b"end\r\n", b"value x 0 1\r\ny\r\nend"];
    if random.random_bool(0.4) {
        return SOME.choose(random).expect("not empty").to_vec();
    }
    let longest = *[20, 200, 1000, 1400, 5000, 20_000].choose(random).expect("not empty");
    let length = random.random_range(0..longest);
    // Neither upper case nor the placeholder, which would be taken for what they are not.
    let mut value: Vec<u8> =
        (0..length).map(|_| *b"0123456789abcdefghijklmnopqrstuvwxyz \r\n".choose(random).expect("not empty")).collect();
    value.push(b'.');
    value
}

/// Anything, in any order, from any client: drawn from `seed`. `datagrams`: also such that only a server with one thread
/// answers in the order in which they came.
pub fn random(seed: u64, length: usize, datagrams: bool) -> Stream {
    let mut random = SmallRng::seed_from_u64(seed);
    let random = &mut random;
    let keys = keys(&format!("r{seed:x}"), random);
    let mut templates = templates();
    // Two things that memcached does not do the same way twice: of an item without a visible character INCR reads on behind
    // its end, whatever is there; and a FLUSH_ALL in the future brings back what the last one hid and nobody has freed yet.
    let unclear = ["set of nothing", "mg N30 v", "flush_all 1000", "flush_all 1000 noreply"];
    templates.retain(|template| !unclear.contains(&&template.name[..]) && !template.marks_stale());
    let mut steps = Vec::new();
    for key in &keys {
        let stored = store("set", key, random.random(), 0, &value(random), "");
        steps.push(send(Speech::Text, 0, vec![stored], After::Barrier));
    }
    for _ in 0..length {
        let key = keys.choose(random).expect("not empty");
        match random.random_range(0..100) {
            0..25 => {
                let count = *[1, 1, 1, 2, 3, 8].choose(random).expect("not empty");
                let some: Vec<&[u8]> = (0..count).map(|_| &keys.choose(random).expect("not empty")[..]).collect();
                let verb = *["get", "gets"].choose(random).expect("not empty");
                steps.push(get(verb, &some));
            }
            25..40 => steps.push(Step::Warm(key.clone())),
            40..45 => steps.push(Step::Learn(key.clone())),
            45..75 => {
                let template = templates.choose(random).expect("not empty");
                let mut bytes = template.request(key);
                for _ in 0..*[0, 0, 0, 1, 4].choose(random).expect("not empty") {
                    let same: Vec<&Template> = templates.iter().filter(|t| t.speech == template.speech).collect();
                    let other = same.choose(random).expect("not empty");
                    bytes.extend(other.request(keys.choose(random).expect("not empty")));
                }
                let mut cuts: Vec<usize> =
                    (0..random.random_range(0..4)).map(|_| random.random_range(0..bytes.len())).collect();
                cuts.sort_unstable();
                cuts.dedup();
                cuts.retain(|&at| at > 0);
                let number = random.random_range(1..4);
                steps.push(send(template.speech, number, cut(&bytes, &cuts), After::Barrier));
            }
            75..85 => {
                let verb = *["set", "add", "replace", "append", "prepend"].choose(random).expect("not empty");
                let bytes = store(verb, key, random.random(), 0, &value(random), "");
                if bytes.len() < 1300 && random.random_bool(0.3) {
                    steps.push(Step::Datagram { bytes: datagram(0, &bytes), sentinel: datagrams });
                } else {
                    let at = random.random_range(1..bytes.len());
                    steps.push(send(Speech::Text, 1, cut(&bytes, &[at]), After::Barrier));
                }
            }
            85..92 if datagrams => {
                let template = templates.choose(random).expect("not empty");
                if template.speech == Speech::Text && template.request(key).len() < 1300 {
                    steps.push(Step::Datagram { bytes: datagram(0, &template.request(key)), sentinel: true });
                } else {
                    let bytes = bad_datagrams(key).choose(random).expect("not empty").clone();
                    steps.push(Step::Datagram { bytes, sentinel: true });
                }
            }
            85..98 => {
                // A connection of its own: nobody knows what state it is left in.
                let speech = *[Speech::Text, Speech::Binary].choose(random).expect("not empty");
                let all = if speech == Speech::Text { bad_text(key) } else { bad_binary(key) };
                let (bytes, after) = all.choose(random).expect("not empty").clone();
                let at = random.random_range(0..bytes.len());
                let number = random.random_range(8..200);
                steps.push(send(speech, number, cut(&bytes, &[at.max(1)]), after));
            }
            _ => {
                let bytes: Vec<u8> = (0..random.random_range(1..300)).map(|_| random.random()).collect();
                steps.push(send(Speech::Text, random.random_range(200..255), vec![bytes], After::Close));
            }
        }
    }
    for key in &keys {
        steps.push(get("gets", &[key]));
    }
    Stream { name: format!("random stream, seed {seed}"), steps }
}

/// Lifetimes that end while somebody watches. Servers keep time in seconds of their own, sometimes two at once, so nothing is
/// read between two seconds before an end and a little after it.
pub fn lifetimes(prefix: &str) -> Stream {
    let key = |name: &str| format!("{prefix}.{name}").into_bytes();
    let names = ["stored", "touched", "kept", "shortened", "gat", "ms", "binary", "flushed"];
    let mut steps = Vec::new();
    for (name, lifetime) in names.iter().zip([5, 0, 5, 1000, 0, 0, 0, 0]) {
        let stored = store("set", &key(name), 1, lifetime, name.as_bytes(), "");
        steps.push(send(Speech::Text, 0, vec![stored], After::Barrier));
        steps.push(Step::Warm(key(name)));
    }
    let text = |request: Vec<u8>| send(Speech::Text, 0, vec![request], After::Barrier);
    steps.push(text(line("touch", &key("touched"), " 5")));
    steps.push(text(line("touch", &key("kept"), " 0")));
    steps.push(text(line("touch", &key("shortened"), " 5 noreply")));
    steps.push(text(line("gat 5", &key("gat"), "")));
    steps.push(text(meta_set(&key("ms"), b"ms", " T5")));
    let touch = Binary::new(opcode::TOUCH, &key("binary")).extras(&[5]).bytes();
    steps.push(send(Speech::Binary, 1, vec![touch], After::Barrier));
    // 1.5 s: all are there. 6.5 s: only those without an end are.
    for pause in [0, 1500, 5000] {
        steps.push(Step::Sleep(Duration::from_millis(pause)));
        for name in names {
            steps.push(Step::Warm(key(name)));
            steps.push(get("gets", &[&key(name)]));
        }
    }
    steps.push(text(b"flush_all 5\r\n".to_vec()));
    for pause in [0, 1500, 5000] {
        steps.push(Step::Sleep(Duration::from_millis(pause)));
        steps.push(Step::Warm(key("flushed")));
        steps.push(get("gets", &[&key("kept"), &key("flushed")]));
    }
    Stream { name: "lifetimes".into(), steps }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cut_is_made_and_loses_nothing() {
        let templates = templates();
        assert!(templates.len() > 120, "{}", templates.len());
        for template in &templates {
            let stream = directed(template, Way::Tcp(template.speech), "p");
            let mut lengths = std::collections::HashSet::new();
            for step in &stream.steps {
                if let Step::Send { connection: (_, 1), pieces, .. } = step {
                    lengths.insert(pieces[0].len());
                    let whole = pieces.concat();
                    assert!(whole.len() % template.request(b"p-00000").len() == 0, "{}", template.name);
                }
            }
            let length = template.request(b"p-00000").len();
            assert!((1..length.min(200)).all(|at| lengths.contains(&at)), "{}", template.name);
        }
    }

    #[test]
    fn a_seed_is_a_stream() {
        let text = |seed| format!("{:?}", random(seed, 200, true));
        assert_eq!(text(3), text(3));
        assert_ne!(text(3), text(4));
    }
}
