//! Two plain memcacheds are twins: whatever differs otherwise is not chance.

use std::time::Duration;

use underpass_bench::process::Directory;
use underpass_cachecheck::{
    server::{self, Options, Server},
    stream::{self, Speech, Stream, Way},
    twin::Twin,
};

fn all_agree(streams: impl IntoIterator<Item = Stream> + Send) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let rack = server::rack(&format!("twin{number}")).unwrap();
    let logs = Directory::new().unwrap();
    let start = |name: &str| {
        Server::start(&rack.host(name).unwrap(), &Options { still: true, ..Options::default() }, &logs).unwrap()
    };
    let (plain, other) = (start("plain"), start("fast"));
    let (from, to) = (plain.address(), other.address());
    let compared = rack.host("client").unwrap().enter(|| {
        let mut twin = Twin::new(from, to, Duration::ZERO).unwrap();
        for stream in streams {
            if let Some(difference) = twin.replay(&stream).unwrap() {
                panic!("{difference}");
            }
        }
        twin.compared
    });
    assert!(compared.unwrap() > 10);
    plain.end().unwrap();
    other.end().unwrap();
    rack.down().unwrap();
}

fn seeds() -> u64 {
    std::env::var("UNDERPASS_STREAMS").map_or(100, |text| text.parse().expect("UNDERPASS_STREAMS is a number"))
}

#[test]
fn every_command_with_every_segmentation() {
    let templates = stream::templates();
    all_agree(templates.iter().enumerate().flat_map(|(number, template)| {
        let mut all = vec![stream::directed(template, Way::Tcp(template.speech), &format!("t{number}"))];
        if template.speech == Speech::Text && template.request(b"k").len() < 1300 {
            all.push(stream::directed(template, Way::Udp, &format!("u{number}")));
        }
        all
    }));
}

#[test]
fn anything_in_any_order() {
    all_agree((0..seeds()).map(|seed| stream::random(seed, 60, true)));
}

#[test]
fn lifetimes_end() {
    all_agree([stream::lifetimes("life")]);
}
