//! Attaching XDP programs: in the mode asked for and no other, never over somebody else's program.

use std::{
    fmt, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    str::FromStr,
};

use crate::coordinator::{owned, sys};

/// How an XDP program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the driver.
    Native,
    /// In the stack, after a socket buffer was made: works everywhere, slower.
    Generic,
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "native" => Ok(Self::Native),
            "generic" => Ok(Self::Generic),
            _ => Err(format!("XDP mode {text:?} is not known: say native or generic")),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "native",
            Self::Generic => "generic",
        })
    }
}

/// Why a program could not be attached, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}{advice}")]
pub struct AttachError {
    what: String,
    source: io::Error,
    advice: String,
}

impl AttachError {
    pub(crate) fn new(what: impl Into<String>, source: io::Error) -> Self {
        let advice = match source.raw_os_error() {
            Some(libc::EPERM) => ". It needs root, or the capabilities CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON",
            _ => "",
        };
        Self { what: what.into(), source, advice: advice.into() }
    }
}

/// An XDP attachment; dropping it detaches, unless it is pinned.
#[derive(Debug)]
pub struct Link {
    fd: OwnedFd,
}

impl Link {
    fn open(path: &Path) -> io::Result<Self> {
        let c_path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).expect("no NUL in our own paths");
        // SAFETY: a NUL-terminated path that outlives the call.
        Ok(Self { fd: owned(unsafe { sys::bpf_obj_get(c_path.as_ptr()) })? })
    }

    /// Whether an attachment to this interface is pinned at `path`.
    pub fn is_pinned_on(path: &Path, ifindex: u32) -> bool {
        Self::open(path).is_ok_and(|link| link.ifindex().is_ok_and(|on| on == ifindex))
    }

    /// Takes over the attachment pinned at `path` and puts `program` in its place, in one step.
    pub fn take_over(path: &Path, program: BorrowedFd<'_>, ifindex: u32) -> Result<Self, AttachError> {
        let at = || format!("taking over the attachment pinned at {}", path.display());
        let link = Self::open(path).map_err(|e| AttachError::new(at(), e))?;
        if link.ifindex().map_err(|e| AttachError::new(at(), e))? != ifindex {
            // The device it was on is gone; its number may even have been given to another.
            let gone = io::Error::new(io::ErrorKind::NotFound, "it is not on this device any more");
            return Err(AttachError {
                what: at(),
                source: gone,
                advice: ". Remove it with `underpass coordinator detach --device ...` and start again".into(),
            });
        }
        // SAFETY: both descriptors are open; no options.
        let updated = unsafe { sys::bpf_link_update(link.fd.as_raw_fd(), program.as_raw_fd(), std::ptr::null()) };
        if updated < 0 {
            return Err(AttachError::new(at(), io::Error::from_raw_os_error(-updated)));
        }
        Ok(link)
    }

    /// The interface that it is on; 0: none any more.
    pub fn ifindex(&self) -> io::Result<u32> {
        // SAFETY: all-zero is a valid value of this C structure of integers.
        let mut info: sys::bpf_link_info = unsafe { std::mem::zeroed() };
        let mut len = size_of::<sys::bpf_link_info>() as u32;
        // SAFETY: `info` is writable for `len` bytes.
        let got = unsafe { sys::bpf_obj_get_info_by_fd(self.fd.as_raw_fd(), (&raw mut info).cast(), &mut len) };
        if got < 0 {
            return Err(io::Error::from_raw_os_error(-got));
        }
        // SAFETY: the link was made with attach type BPF_XDP, whose part of the union this is.
        Ok(unsafe { info.__bindgen_anon_1.xdp.ifindex })
    }

    /// Makes the attachment outlive this process.
    pub fn pin(&self, path: &Path) -> Result<(), AttachError> {
        if path.exists() {
            return Ok(());
        }
        let c_path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).expect("no NUL in our own paths");
        // SAFETY: an open descriptor and a NUL-terminated path that outlives the call.
        let pinned = unsafe { sys::bpf_obj_pin(self.fd.as_raw_fd(), c_path.as_ptr()) };
        if pinned < 0 {
            let source = io::Error::from_raw_os_error(-pinned);
            return Err(AttachError::new(format!("pinning the attachment at {}", path.display()), source));
        }
        Ok(())
    }

    /// Detaches what is pinned at `path`, if anything.
    pub fn detach_pinned(path: &Path) {
        if let Ok(link) = Self::open(path) {
            link.detach();
        }
    }

    /// Detaches at once, pinned or not.
    pub fn detach(self) {
        // SAFETY: an open descriptor.
        unsafe { sys::bpf_link_detach(self.fd.as_raw_fd()) };
    }
}

/// Attaches an XDP program to an interface of the caller's network namespace.
pub fn attach_xdp(program: BorrowedFd<'_>, ifindex: u32, mode: Mode) -> Result<Link, AttachError> {
    let name = interface_name(ifindex);
    let what = format!("attaching to {name} in {mode} mode");
    if !is_up(&name) {
        return Err(AttachError {
            what,
            source: io::Error::new(io::ErrorKind::NetworkDown, "the interface is down"),
            advice: format!(". Bring it up: `ip link set {name} up`"),
        });
    }
    let flags = match mode {
        Mode::Native => sys::XDP_FLAGS_DRV_MODE,
        Mode::Generic => sys::XDP_FLAGS_SKB_MODE,
    };
    // SAFETY: all-zero is a valid value of this C structure.
    let mut options: sys::bpf_link_create_opts = unsafe { std::mem::zeroed() };
    options.sz = size_of::<sys::bpf_link_create_opts>() as _;
    options.flags = flags;
    // SAFETY: an open program descriptor; `options` outlives the call.
    let fd =
        unsafe { sys::bpf_link_create(program.as_fd().as_raw_fd(), ifindex as i32, sys::BPF_XDP, &raw const options) };
    match owned(fd) {
        Ok(fd) => Ok(Link { fd }),
        Err(source) => {
            let advice = match source.raw_os_error() {
                Some(libc::EBUSY | libc::EEXIST) => format!(
                    ". Another XDP program is attached to {name} (see `ip -d link show {name}`). It is not replaced: detach \
                     it, or use another interface"
                ),
                Some(libc::EOPNOTSUPP | libc::EINVAL) if mode == Mode::Native => {
                    ". The driver does not run XDP itself, or not with this MTU or these offloads: use mode generic, a \
                     smaller MTU, or another interface"
                        .into()
                }
                Some(libc::EPERM) => {
                    ". It needs root, or the capabilities CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON".into()
                }
                _ => String::new(),
            };
            Err(AttachError { what, source, advice })
        }
    }
}

/// The index of an interface of the caller's network namespace.
pub fn interface_index(name: &str) -> Result<u32, AttachError> {
    nix::net::if_::if_nametoindex(name).map_err(|e| AttachError {
        what: format!("interface {name:?}"),
        source: e.into(),
        advice: ". `ip link` lists the interfaces that there are".into(),
    })
}

fn interface_name(ifindex: u32) -> String {
    let mut name = [0; libc::IF_NAMESIZE];
    // SAFETY: a buffer of the size that the call asks for.
    let found = unsafe { libc::if_indextoname(ifindex, name.as_mut_ptr().cast()) };
    if found.is_null() {
        return format!("interface number {ifindex}");
    }
    std::ffi::CStr::from_bytes_until_nul(&name)
        .map_or_else(|_| format!("interface number {ifindex}"), |name| name.to_string_lossy().into_owned())
}

/// Whether the interface is up, as the socket layer tells; sysfs would tell of the namespace that it was mounted in.
fn is_up(name: &str) -> bool {
    nix::ifaddrs::getifaddrs().is_ok_and(|mut all| {
        all.any(|i| i.interface_name == name && i.flags.contains(nix::net::if_::InterfaceFlags::IFF_UP))
    })
}
