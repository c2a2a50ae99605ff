//! The control socket: a line with a command comes in, a line of JSON goes out.

use std::{
    fs, io,
    io::{BufRead, BufReader, Read, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering::Relaxed},
    thread::{self, JoinHandle},
    time::Duration,
};

use socket2::{Domain, SockAddr, Socket, Type};

use crate::{Error, Shared, Stats};

/// How long a client of the control socket may take for its command and for taking the answer.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Longest command in bytes.
const COMMAND_MAX: u64 = 256;

/// The control socket and the thread behind it. Dropping it removes both.
pub struct Control {
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

impl Control {
    pub fn start(path: &Path, shared: Arc<Shared>) -> Result<Self, Error> {
        let listener = listen(path).map_err(|why| Error::Control { path: path.into(), why })?;
        let for_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("replica-control".into())
            .spawn(move || answer_all(&listener, &for_thread))
            .map_err(Error::Thread)?;
        Ok(Self { path: path.into(), thread: Some(thread), shared })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.shared.stop.store(true, Relaxed);
        // Wakes the thread out of its accept.
        let woken = UnixStream::connect(&self.path).is_ok();
        if let (true, Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join();
        }
        let _ = fs::remove_file(&self.path);
    }
}

fn listen(path: &Path) -> Result<UnixListener, String> {
    let text = |error: io::Error| error.to_string();
    if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        fs::create_dir_all(directory).map_err(|error| format!("directory {}: {error}", directory.display()))?;
    }
    if let Ok(metadata) = fs::symlink_metadata(path) {
        use std::os::unix::fs::FileTypeExt;
        if !metadata.file_type().is_socket() {
            return Err("there is a file of that name that is not a socket".into());
        }
        match UnixStream::connect(path) {
            Ok(_) => return Err("another replica answers there".into()),
            // Left behind by a replica that was killed.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).map_err(text)?,
            Err(error) => return Err(text(error)),
        }
    }
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(text)?;
    socket.bind(&SockAddr::unix(path).map_err(text)?).map_err(text)?;
    // Between bind and listen nobody can connect, so nobody else ever gets in.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(text)?;
    socket.listen(8).map_err(text)?;
    Ok(socket.into())
}

fn answer_all(listener: &UnixListener, shared: &Shared) {
    for stream in listener.incoming() {
        if shared.stop.load(Relaxed) {
            return;
        }
        match stream.and_then(|stream| answer(&stream, shared)) {
            Ok(()) => {}
            Err(error) => {
                tracing::debug!("control socket: {error}");
                // Out of file descriptors, say: not to be asked again at once.
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

fn answer(mut stream: &UnixStream, shared: &Shared) -> io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut command = String::new();
    BufReader::new(stream.take(COMMAND_MAX)).read_line(&mut command)?;
    let mut line = match command.trim() {
        "stats" => serde_json::to_vec(&shared.stats()),
        other => serde_json::to_vec(&serde_json::json!({
            "error": format!("unknown command {other:?}; there is: stats"),
        })),
    }
    .map_err(io::Error::other)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Asks the replica behind a control socket for its stats; the line of JSON as it came, and what it says.
///
/// # Errors
/// When nobody answers there, or not as a replica would.
pub fn ask(path: &Path) -> io::Result<(String, Stats)> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(5 * TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.write_all(b"stats\n")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let stats = serde_json::from_str(&line).map_err(io::Error::other)?;
    Ok((line, stats))
}
