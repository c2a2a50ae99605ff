//! Attaching TC programs for the two write paths that clone there.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use libbpf_rs::{TC_EGRESS, TC_INGRESS, TcHook, TcHookBuilder};

use crate::attach::AttachError;

/// Our filter's handle and priority: fixed, so that a filter left by a crash is found and replaced.
const HANDLE: u32 = 0x5550;
const PRIORITY: u32 = 0x5550;

/// Which side of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcDirection {
    /// Received packets.
    Ingress,
    /// Sent packets.
    Egress,
}

/// A TC attachment; dropping it detaches, unless it is to stay.
pub struct TcAttachment {
    hook: TcHook,
    stays: bool,
    _program: OwnedFd,
}

impl TcAttachment {
    /// Attaches a program; one that a crashed coordinator left under our own handle is replaced.
    pub fn new(program: BorrowedFd<'_>, ifindex: u32, direction: TcDirection) -> Result<Self, AttachError> {
        let error = |e: libbpf_rs::Error| AttachError::new("attaching the TC program", crate::coordinator::io_error(e));
        let keep = program.try_clone_to_owned().map_err(|e| AttachError::new("attaching the TC program", e))?;
        let mut hook = TcHookBuilder::new(keep.as_fd())
            .ifindex(ifindex as i32)
            .replace(true)
            .handle(HANDLE)
            .priority(PRIORITY)
            .hook(match direction {
                TcDirection::Ingress => TC_INGRESS,
                TcDirection::Egress => TC_EGRESS,
            });
        // The qdisc may be there already, also with filters of others: it is not removed on detach.
        hook.create().map_err(error)?;
        let hook = hook.attach().map_err(error)?;
        Ok(Self { hook, stays: false, _program: keep })
    }
}

impl TcAttachment {
    /// Leaves it in place when this value is dropped.
    pub fn stay(&mut self) {
        self.stays = true;
    }

    /// Detaches at once, also what was to stay.
    pub fn detach(mut self) {
        self.stays = false;
    }

    /// Removes our filters from an interface, if there are any, but for the side that is in use.
    pub fn remove_left(ifindex: u32, in_use: Option<TcDirection>) {
        let nobody = std::io::stdin();
        // The builder wants a descriptor; detaching goes by handle and priority and never looks at it.
        let mut builder = TcHookBuilder::new(nobody.as_fd());
        builder.ifindex(ifindex as i32).handle(HANDLE).priority(PRIORITY);
        for (side, point) in [(TcDirection::Ingress, TC_INGRESS), (TcDirection::Egress, TC_EGRESS)] {
            if in_use != Some(side) {
                let _ = builder.hook(point).detach();
            }
        }
    }
}

impl Drop for TcAttachment {
    fn drop(&mut self) {
        if !self.stays {
            let _ = self.hook.detach();
        }
    }
}
