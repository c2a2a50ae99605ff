//! Descriptions of racks: what is worked out of good ones, and what is said about bad ones.

use std::collections::BTreeSet;

use underpass_rack::{Config, Fault, PORTS_MAX, Probability};

fn error(text: &str) -> String {
    match text.parse::<Config>().and_then(|config| config.topology()) {
        Ok(topology) => panic!("accepted: {text}\n{topology:?}"),
        Err(error) => error.to_string(),
    }
}

/// With a good head.
fn hosts(hosts: &str) -> String {
    format!("name = \"r\"\nsubnet = \"10.0.0.0/24\"\nhost = [{hosts}]")
}

const TWO_SUBNETS: &str = r#"
    name = "r"
    [[subnet]]
    name = "front"
    range = "10.0.0.0/24"
    [[subnet]]
    name = "back"
    range = "10.0.1.0/24"
"#;

#[test]
fn a_bad_description_is_refused_with_what_to_do() {
    let many: Vec<_> = (0..=PORTS_MAX).map(|n| format!("{{ name = \"h{n}\" }}")).collect();
    let cases = [
        // Not TOML, or not this TOML.
        ("name =".to_string(), "line 1, column 7"),
        ("name = \"r\"\nsubnet = \"10.0.0.0/24\"\nhosts = []".into(), "unknown field `hosts`"),
        (hosts("{ name = \"a\", adress = \"10.0.0.1\" }"), "unknown field `adress`"),
        ("name = \"r\"\nhost = [{ name = \"a\" }]".into(), "missing field `subnet`"),
        ("name = \"r\"\nsubnet = 24".into(), "a range such as \"10.77.0.0/24\""),
        ("name = \"r\"\nsubnet = \"10.0.0.0\"".into(), "a range such as \"10.77.0.0/24\""),
        (hosts("{ name = \"a\", mac = \"2:0:0:0:0:1\" }"), "is not a MAC address such as"),
        (hosts("{ name = \"a\" }") + "\nfault = { loss = \"101%\" }", "is not a probability"),
        (hosts("{ name = \"a\" }") + "\nfault = { loss = -0.1 }", "is not a probability"),
        (hosts("{ name = \"a\" }") + "\nfault = { loss = \"some\" }", "is not a probability"),
        (hosts("{ name = \"a\" }") + "\nfault = { delay = \"fast\" }", "is not a duration"),
        (hosts("{ name = \"a\" }") + "\nfault = { delay = \"2h\" }", "too long"),
        // Names.
        ("name = \"\"\nsubnet = \"10.0.0.0/24\"".into(), "empty name"),
        ("name = \"a.b\"\nsubnet = \"10.0.0.0/24\"".into(), "contains '.'"),
        ("name = \"../x\"\nsubnet = \"10.0.0.0/24\"".into(), "contains '.'"),
        (format!("name = \"{}\"\nsubnet = \"10.0.0.0/24\"", "x".repeat(33)), "shorten it to 32"),
        (hosts("{ name = \"a-name-of-sixteen\" }"), "shorten it to 15"),
        (hosts("{ name = \"a/b\" }"), "contains '/'"),
        (hosts("{ name = \"A\" }"), "lower-case"),
        (hosts("{ name = \"a b\" }"), "contains ' '"),
        (hosts("{ name = \"-a\" }"), "hyphen"),
        (hosts("{ name = \"lo\" }"), "loopback"),
        (hosts("{ name = \"a\" }, { name = \"a\" }"), "two hosts or interfaces are called \"a\""),
        // Addresses.
        (hosts("{ name = \"a\", address = \"10.0.1.1\" }"), "outside of its subnet 10.0.0.0/24"),
        (hosts("{ name = \"a\", address = \"10.0.0.0\" }"), "network or broadcast"),
        (hosts("{ name = \"a\", address = \"10.0.0.255\" }"), "network or broadcast"),
        (
            hosts("{ name = \"a\", address = \"10.0.0.9\" }, { name = \"b\", address = \"10.0.0.9\" }"),
            "hosts \"a\" and \"b\" both have address 10.0.0.9",
        ),
        (hosts("{ name = \"a\", address = \"10.0.0.9\", extra_addresses = [\"10.0.0.9\"] }"), "twice"),
        (
            hosts("{ name = \"a\", mac = \"02:00:00:00:00:01\" }, { name = \"b\", mac = \"02:00:00:00:00:01\" }"),
            "both have MAC address 02:00:00:00:00:01",
        ),
        (hosts("{ name = \"a\", mac = \"01:00:00:00:00:01\" }"), "not the address of one interface"),
        (hosts("{ name = \"a\", mac = \"00:00:00:00:00:00\" }"), "not the address of one interface"),
        // Subnets.
        ("name = \"r\"\nsubnet = []\nhost = [{ name = \"a\" }]".into(), "needs a subnet"),
        ("name = \"r\"\nsubnet = \"10.0.0.1/24\"".into(), "write 10.0.0.0/24"),
        ("name = \"r\"\nsubnet = \"10.0.0.0/31\"".into(), "prefix length must be 8 to 30"),
        ("name = \"r\"\nsubnet = \"127.0.0.0/24\"".into(), "reserved"),
        ("name = \"r\"\nsubnet = \"224.0.0.0/24\"".into(), "reserved"),
        (TWO_SUBNETS.replace("10.0.1.0/24", "10.0.0.128/25"), "overlap"),
        (TWO_SUBNETS.replace("back", "front"), "two subnets are called \"front\""),
        (format!("{TWO_SUBNETS}\n[[host]]\nname = \"a\""), "add subnet = one of: front, back"),
        (format!("{TWO_SUBNETS}\n[[host]]\nname = \"a\"\nsubnet = \"side\""), "there is no subnet \"side\""),
        (
            "name = \"r\"\nsubnet = \"10.0.0.0/30\"\nhost = [{ name = \"a\" }, { name = \"b\" }, { name = \"c\" }]"
                .into(),
            "no free address",
        ),
        // Hosts and routers.
        ("name = \"r\"\nsubnet = \"10.0.0.0/24\"".into(), "at least one [[host]]"),
        (hosts(&many.join(",")), "65 links to the switch, which has 64 ports"),
        (hosts("{ name = \"a\", cpu = 0 }"), "threaded = true"),
        (format!("{TWO_SUBNETS}\n[[router]]\nname = \"x\"\nlink = [{{ subnet = \"front\" }}]"), "give it two or more"),
        (
            format!(
                "{TWO_SUBNETS}\n[[router]]\nname = \"x\"\nlink = [{{ subnet = \"front\" }}, {{ subnet = \"front\" }}]"
            ),
            "two links to subnet \"front\"",
        ),
        (
            format!(
                "{TWO_SUBNETS}\n[[host]]\nname = \"x-0\"\nsubnet = \"front\"\n\
                 [[router]]\nname = \"x\"\nlink = [{{ subnet = \"front\" }}, {{ subnet = \"back\" }}]"
            ),
            "two hosts or interfaces are called \"x-0\"",
        ),
    ];
    for (text, expected) in cases {
        let message = error(&text);
        assert!(message.contains(expected), "{text}\nsays: {message}\nbut should say: {expected}");
    }
}

#[test]
fn addresses_are_handed_out_around_those_given() {
    let config: Config =
        hosts("{ name = \"a\" }, { name = \"b\", address = \"10.0.0.2\" }, { name = \"c\" }").parse().unwrap();
    let topology = config.topology().unwrap();
    let addresses: Vec<_> = topology.hosts.iter().map(|host| host.links[0].address.to_string()).collect();
    assert_eq!(addresses, ["10.0.0.1", "10.0.0.2", "10.0.0.3"]);
    let macs: Vec<_> = topology.hosts.iter().map(|host| host.links[0].mac.to_string()).collect();
    assert_eq!(macs[1], "02:00:0a:00:00:02");
    let ports: BTreeSet<_> = topology.hosts.iter().map(|host| host.links[0].port).collect();
    assert_eq!(ports.len(), 3);
    assert!(topology.hosts.iter().all(|host| host.routes.is_empty()));
}

#[test]
fn the_largest_rack_fits() {
    let hosts_: Vec<_> = (0..PORTS_MAX).map(|n| format!("{{ name = \"h{n}\" }}")).collect();
    let topology = hosts(&hosts_.join(",")).parse::<Config>().unwrap().topology().unwrap();
    assert_eq!(topology.hosts.len(), PORTS_MAX);
}

#[test]
fn routes_lead_over_the_nearest_router() {
    let config: Config = r#"
        name = "r"
        [[subnet]]
        name = "a"
        range = "10.0.0.0/24"
        [[subnet]]
        name = "b"
        range = "10.0.1.0/24"
        [[subnet]]
        name = "c"
        range = "10.0.2.0/24"
        [[host]]
        name = "x"
        subnet = "a"
        [[router]]
        name = "ab"
        link = [{ subnet = "a" }, { subnet = "b" }]
        [[router]]
        name = "bc"
        link = [{ subnet = "b", address = "10.0.1.7" }, { subnet = "c" }]
    "#
    .parse()
    .unwrap();
    let topology = config.topology().unwrap();
    let routes = |host: usize| -> Vec<_> {
        topology.hosts[host].routes.iter().map(|route| format!("{} via {}", route.to, route.via)).collect()
    };
    assert_eq!(routes(0), ["10.0.1.0/24 via 10.0.0.254", "10.0.2.0/24 via 10.0.0.254"]);
    assert_eq!(routes(1), ["10.0.2.0/24 via 10.0.1.7"]);
    assert_eq!(routes(2), ["10.0.0.0/24 via 10.0.1.254"]);
}

#[test]
fn faults_are_read_as_written() {
    let text = hosts("{ name = \"a\" }")
        + "\nfault = { loss = \"1%\", duplicate = 0.5, delay = \"200us\", jitter = \"1ms 500us\" }";
    let fault = text.parse::<Config>().unwrap().fault;
    let expected = Fault {
        loss: Probability::new(0.01).unwrap(),
        duplicate: Probability::new(0.5).unwrap(),
        delay: std::time::Duration::from_micros(200),
        jitter: std::time::Duration::from_micros(1500),
        ..Default::default()
    };
    assert_eq!(fault, expected);
    assert_eq!(fault.to_string(), "loss 1%, duplicate 50%, delay 200us, jitter 1ms500us");
}

#[test]
fn the_example_is_right() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/examples");
    for name in ["rack.toml", "rack-routed.toml"] {
        Config::read(&path.join(name)).unwrap();
    }
}
