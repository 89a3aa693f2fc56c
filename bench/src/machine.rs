//! The machine that the figures are of, in a few lines.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use postgres::Client;

use crate::Result;
use crate::cluster::Cluster;
use crate::stats::median;

/// What is not to be had on this operating system is left out.
pub fn describe(cluster: &Cluster, client: &mut Client) -> Result<String> {
    let cores = std::thread::available_parallelism()?;
    let cpu = field("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    let mut text = format!("machine: {cpu}, {cores} cores");
    if let Some(memory) = field("/proc/meminfo", "MemTotal") {
        text += &format!(", memory {memory}");
    }
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    text += &format!("\nkernel: {} {}", std::env::consts::OS, kernel.trim());
    if let Ok(load) = fs::read_to_string("/proc/loadavg") {
        text += &format!(
            ", load at the start {}",
            load.split_whitespace().next().unwrap_or_default()
        );
    }
    let row = client.query_one(
        "SELECT current_setting('server_version'), current_setting('wal_sync_method'), current_setting('shared_buffers')",
        &[],
    )?;
    let (version, method, buffers): (&str, &str, &str) = (row.get(0), row.get(1), row.get(2));
    text += &format!(
        "\nserver: PostgreSQL {version}, shared_buffers {buffers}, fsync on, wal_sync_method {method}"
    );
    let kind = filesystem(cluster.dir()).unwrap_or_else(|| "of unknown kind".into());
    text += &format!(
        "\ndisk: filesystem {kind}, 8 kB written and synced in {:.0} us\n",
        sync_time_us(cluster.dir())?
    );
    Ok(text)
}

/// The first `name : value` of a file in /proc.
fn field(file: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_string())
    })
}

/// The kind of the filesystem that holds `path`: the mount with the longest matching path.
fn filesystem(path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let kinds = mounts.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (point, kind) = (words.next()?, words.next()?);
        path.starts_with(point)
            .then(|| (point.len(), kind.to_string()))
    });
    kinds
        .max_by_key(|(length, _)| *length)
        .map(|(_, kind)| kind)
}

/// The median time of writing one page over itself and waiting until it is on disk.
fn sync_time_us(dir: &Path) -> Result<f64> {
    let path = dir.join("sync");
    let file = File::create(&path)?;
    let mut times = Vec::new();
    for _ in 0..200 {
        file.write_all_at(&[1; 8192], 0)?;
        let begin = Instant::now();
        file.sync_data()?;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    fs::remove_file(&path)?;
    Ok(median(&times))
}
