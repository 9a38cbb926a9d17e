//! Detects the process id, the number of processes and the coordinator from flags, YAML, or the launcher's environment
//! variables.

use std::path::Path;

use ltx2_base::text_file;

/// Default port of the coordinator.
const PORT: u16 = 8476;
/// Name of the launcher whose pods have no DNS names until they start.
pub(super) const JOBSET: &str = "Kubernetes JobSet";
/// Range of coordinator ports. The job number selects a port, so that jobs on one host rarely collide.
const JOB_PORTS: std::ops::Range<u64> = 61_440..65_536;

/// Options from flags and YAML; missing ones are read from the environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaunchOptions {
    /// `HOST:PORT` of process 0, or `etcd://HOST:PORT/RUN`.
    pub coordinator: Option<String>,
    /// Id of this process, from 0.
    pub process_id: Option<usize>,
    /// Number of processes; 1 ignores the environment and runs a single process.
    pub num_processes: Option<usize>,
}

/// Identity of this process in a multi-process run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Id of this process, from 0.
    pub id: usize,
    /// Number of processes of the run.
    pub count: usize,
    /// `HOST:PORT` of process 0, or `etcd://HOST:PORT/RUN`.
    pub coordinator: String,
    /// Launcher or options that the values come from, for messages.
    pub how: String,
}

/// Missing or contradictory launch options.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("multi-process launch ({how}): {why}")]
pub struct LaunchError {
    how: String,
    why: String,
}

/// Values detected from a launcher's environment.
struct LauncherValues {
    how: &'static str,
    id: usize,
    count: usize,
    coordinator: Option<String>,
}

impl Launch {
    /// Determines the id of this process, the number of processes and the coordinator; `None` for a single process.
    /// `variable` reads an environment variable. Fails if an option is missing or contradicts another.
    pub fn detect(
        options: &LaunchOptions,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Launch>, LaunchError> {
        let variable = |name: &str| variable(name).map(|v| v.trim().to_string()).filter(|v| !v.is_empty());
        let error = |how: &str, why: String| LaunchError { how: how.into(), why };
        if options.num_processes == Some(1) {
            return Ok(None);
        }
        // Each LTX2_* variable may be set individually, together with flags or a launcher.
        let own = |flag: Option<usize>, name| flag.map_or_else(|| number(&variable, name), |given| Ok(Some(given)));
        let (id, count) =
            (own(options.process_id, "LTX2_PROCESS_ID")?, own(options.num_processes, "LTX2_NUM_PROCESSES")?);
        let coordinator = options.coordinator.clone().or_else(|| variable("LTX2_COORDINATOR"));
        if count == Some(1) {
            return Ok(None);
        }
        // If all three values are set, launcher variables are ignored.
        let whole = id.is_some() && count.is_some() && coordinator.is_some();
        let launchers: &[Launcher] = if whole { &[] } else { &[ours, slurm, open_mpi, jobset, tpu] };
        let found = launchers.iter().find_map(|launcher| launcher(&variable).transpose()).transpose()?;
        let id = id.or(found.as_ref().map(|f| f.id));
        let count = count.or(found.as_ref().map(|f| f.count));
        let given = options.process_id.is_some() || options.num_processes.is_some() || coordinator.is_some();
        let how = match &found {
            Some(found) if !given => found.how.to_string(),
            Some(found) => format!("{} with overrides from flags, YAML or LTX2_*", found.how),
            None => "flags, YAML or LTX2_*".to_string(),
        };
        let coordinator = coordinator.or_else(|| found.and_then(|f| f.coordinator));
        let why = match (id, count, coordinator) {
            (None, None, None) | (_, Some(1), _) => return Ok(None),
            (_, Some(0), _) => "the number of processes is 0; pass --num-processes N".to_string(),
            (Some(id), Some(count), _) if id >= count => {
                format!("process id {id} is out of range for {count} processes (ids start at 0)")
            }
            (Some(id), Some(count), Some(coordinator)) => match place(&coordinator) {
                Ok(coordinator) => return Ok(Some(Launch { id, count, coordinator, how })),
                Err(why) => why,
            },
            (None, ..) => "cannot infer the process id; pass --process-id N".into(),
            (_, None, _) => "cannot infer the number of processes; pass --num-processes N".into(),
            (_, _, None) => "cannot infer the coordinator; pass --coordinator HOST:PORT of process 0".into(),
        };
        Err(error(&how, why))
    }
}

/// Returns the coordinator with a port, adding the default one if missing.
fn place(coordinator: &str) -> Result<String, String> {
    if coordinator.starts_with(super::store::ETCD) {
        return Ok(coordinator.into());
    }
    let wrong = || format!("coordinator '{coordinator}' is invalid; use the form HOST:PORT");
    match coordinator.rsplit_once(':') {
        // An IPv6 address without brackets cannot have a port.
        Some((host, port)) if !host.is_empty() && (!host.contains(':') || host.ends_with(']')) => {
            port.parse::<u16>().map(|_| coordinator.to_string()).map_err(|_| wrong())
        }
        Some(_) => Err(wrong()),
        None if coordinator.is_empty() => Err(wrong()),
        None => Ok(format!("{coordinator}:{PORT}")),
    }
}

type EnvLookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Function that detects one launcher; `None` if the launcher's marker variable is not set.
type Launcher = fn(EnvLookup) -> Result<Option<LauncherValues>, LaunchError>;

/// Parses a variable as a number; `None` if it is not set.
fn number<N: std::str::FromStr>(variable: EnvLookup, name: &str) -> Result<Option<N>, LaunchError> {
    let Some(text) = variable(name) else { return Ok(None) };
    let wrong = || LaunchError { how: name.into(), why: format!("'{text}' is not a number") };
    text.parse().map(Some).map_err(|_| wrong())
}

/// Parses a variable that the launcher always sets together with `mark`. The variable is required, because without it
/// this process would get a wrong id or run as a single process.
fn needed(variable: EnvLookup, name: &str, mark: &str) -> Result<usize, LaunchError> {
    let why = || {
        format!(
            "the variable is not set, although {mark} is; set it, or pass --num-processes 1 to run a single process"
        )
    };
    number(variable, name)?.ok_or_else(|| LaunchError { how: name.into(), why: why() })
}

/// Returns a port that all processes of a job share and that differs between most jobs.
fn job_port(job: u64) -> u64 {
    JOB_PORTS.start + job % (JOB_PORTS.end - JOB_PORTS.start)
}

/// Reads the LTX2_* variables, which work with any launcher.
fn ours(variable: EnvLookup) -> Result<Option<LauncherValues>, LaunchError> {
    let both = (number(variable, "LTX2_PROCESS_ID")?, number(variable, "LTX2_NUM_PROCESSES")?);
    let (Some(id), Some(count)) = both else { return Ok(None) };
    Ok(Some(LauncherValues { how: "LTX2_PROCESS_ID", id, count, coordinator: variable("LTX2_COORDINATOR") }))
}

/// Detects a task of SLURM's `srun`, which belongs to a job step. The batch script has a task number too, but no step.
fn slurm(variable: EnvLookup) -> Result<Option<LauncherValues>, LaunchError> {
    const MARK: &str = "SLURM_STEP_NODELIST";
    let Some(nodes) = variable(MARK) else { return Ok(None) };
    let id = needed(variable, "SLURM_PROCID", MARK)?;
    let count = match number(variable, "SLURM_STEP_NUM_TASKS")? {
        Some(count) => count,
        None => needed(variable, "SLURM_NTASKS", MARK)?,
    };
    let job = number(variable, "SLURM_JOB_ID")?;
    let coordinator = job.map(|job| format!("{}:{}", first_host(&nodes), job_port(job)));
    Ok(Some(LauncherValues { how: "SLURM", id, count, coordinator }))
}

/// Returns the first host of a SLURM node list: `n003` for `n[003-007,9],m1`.
fn first_host(nodes: &str) -> String {
    match nodes.split_once('[') {
        Some((prefix, rest)) if !prefix.contains(',') => {
            let inside = rest.split(']').next().unwrap_or_default();
            let first = inside.split([',', '-']).next().unwrap_or_default();
            let suffix = rest.split_once(']').map_or("", |(_, s)| s.split(',').next().unwrap_or_default());
            format!("{prefix}{first}{suffix}")
        }
        _ => nodes.split(',').next().unwrap_or_default().to_string(),
    }
}

/// Detects a process of Open MPI's `mpirun`. The variables of Open MPI contain the host of process 0 only if all
/// processes are on one host.
fn open_mpi(variable: EnvLookup) -> Result<Option<LauncherValues>, LaunchError> {
    const MARK: &str = "OMPI_COMM_WORLD_SIZE";
    let Some(count) = number(variable, MARK)? else { return Ok(None) };
    let id = needed(variable, "OMPI_COMM_WORLD_RANK", MARK)?;
    let here = number(variable, "OMPI_COMM_WORLD_LOCAL_SIZE")? == Some(count);
    // The job name contains non-digits, so it is hashed to a number.
    let job = variable("PMIX_NAMESPACE").unwrap_or_default();
    let job = job.bytes().fold(0u64, |n, b| n.wrapping_mul(31).wrapping_add(b.into()));
    let coordinator = here.then(|| format!("127.0.0.1:{}", job_port(job)));
    Ok(Some(LauncherValues { how: "Open MPI", id, count, coordinator }))
}

/// Detects a pod of a Kubernetes JobSet, with the variables that scripts/pod/jobset.yml sets.
fn jobset(variable: EnvLookup) -> Result<Option<LauncherValues>, LaunchError> {
    const MARK: &str = "REPLICATED_JOB_NAME";
    let (Some(set), Some(job)) = (variable("JOBSET_NAME"), variable(MARK)) else { return Ok(None) };
    // Without PROCESSES_IN_JOB this is a JobSet that does not use scripts/pod/jobset.yml.
    let Some(pods) = number::<usize>(variable, "PROCESSES_IN_JOB")? else { return Ok(None) };
    let pod = needed(variable, "JOB_COMPLETION_INDEX", MARK)?;
    let jobs = match number(variable, "JOBS_IN_SET")? {
        Some(jobs) => jobs,
        None => number(variable, "MEGASCALE_NUM_SLICES")?.unwrap_or(1),
    };
    // JOB_INDEX is also read if the number of jobs is 1: if that number is wrong, the second job fails because its id
    // is out of range, instead of running as the first job.
    let index =
        if jobs > 1 { needed(variable, "JOB_INDEX", MARK)? } else { number(variable, "JOB_INDEX")?.unwrap_or(0) };
    // Pods of a JobSet have DNS names under its headless service.
    let coordinator = Some(format!("{set}-{job}-0-0.{set}:{PORT}"));
    Ok(Some(LauncherValues { how: JOBSET, id: index * pods + pod, count: jobs * pods, coordinator }))
}

/// Detects a TPU worker whose slice is described by environment variables, as set by GKE or for several libtpu
/// processes per host.
fn tpu(variable: EnvLookup) -> Result<Option<LauncherValues>, LaunchError> {
    let Some((mark, hosts)) = tpu_processes(variable)? else { return Ok(None) };
    let hosts: Vec<&str> = hosts.split([',', '\n']).map(str::trim).filter(|h| !h.is_empty()).collect();
    let Some(first) = hosts.first() else { return Ok(None) };
    let slices = number(variable, "MEGASCALE_NUM_SLICES")?.unwrap_or(1);
    // A slice of one process needs no index.
    let worker = if hosts.len() > 1 { tpu_worker(variable, mark)? } else { 0 };
    let slice = match slices {
        1 => number(variable, "MEGASCALE_SLICE_ID")?.unwrap_or(0),
        _ => needed(variable, "MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES")?,
    };
    // libtpu listens on the listed ports, so the coordinator uses a port that is not listed. Megascale's coordinator
    // has a separate port.
    let port = (PORT..).find(|port| !hosts.iter().any(|host| host.ends_with(&format!(":{port}")))).unwrap_or(PORT);
    let first = variable("MEGASCALE_COORDINATOR_ADDRESS").filter(|_| slices > 1).unwrap_or_else(|| (*first).into());
    let coordinator = Some(format!("{}:{port}", host_of(&first)));
    let (id, count) = (slice * hosts.len() + worker, slices * hosts.len());
    Ok(Some(LauncherValues { how: "TPU_WORKER_ID", id, count, coordinator }))
}

/// Returns the name of the environment variable that lists the processes of a slice, and the list, separated by commas
/// or line breaks. The order of precedence is the same as in JAX: a file of addresses, addresses, host names. `None`:
/// no variable is set.
fn tpu_processes(variable: EnvLookup) -> Result<Option<(&'static str, String)>, LaunchError> {
    const FILE: &str = "TPU_PROCESS_ADDRESSES_PATH";
    if let Some(path) = variable(FILE) {
        let fail = |why: String| LaunchError { how: FILE.into(), why };
        let text = text_file::read(Path::new(&path)).map_err(|e| fail(format!("cannot read {path}: {e}")))?;
        if text.trim().is_empty() {
            return Err(fail(format!("{path} is empty; write the addresses of the slice's processes to it")));
        }
        return Ok(Some((FILE, text)));
    }
    let listed = |name| variable(name).map(|list| (name, list));
    Ok(listed("TPU_PROCESS_ADDRESSES").or_else(|| listed("TPU_WORKER_HOSTNAMES")))
}

/// Returns the index of this process in its slice: `TPU_WORKER_ID`, or libtpu's `CLOUD_TPU_TASK_ID`.
fn tpu_worker(variable: EnvLookup, mark: &'static str) -> Result<usize, LaunchError> {
    const TASK: &str = "CLOUD_TPU_TASK_ID";
    let task: Option<usize> = number(variable, TASK)?;
    match (number(variable, "TPU_WORKER_ID")?, task) {
        (Some(worker), Some(task)) if worker != task => {
            let why = format!("the value is {task}, but TPU_WORKER_ID is {worker}; unset one, or pass --process-id N");
            Err(LaunchError { how: TASK.into(), why })
        }
        (Some(worker), _) => Ok(worker),
        (None, Some(task)) => Ok(task),
        (None, None) => needed(variable, "TPU_WORKER_ID", mark),
    }
}

/// Extracts the host from `HOST`, `HOST:PORT`, `HOST:PORT:ADDRESS` or `[IPV6]:PORT`.
fn host_of(entry: &str) -> &str {
    let end = if entry.starts_with('[') { entry.find(']').map(|at| at + 1) } else { entry.find(':') };
    &entry[..end.unwrap_or(entry.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(options: LaunchOptions, variables: &[(&str, &str)]) -> Result<Option<Launch>, String> {
        let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_string());
        Launch::detect(&options, find).map_err(|e| e.to_string())
    }

    fn found(variables: &[(&str, &str)]) -> (usize, usize, String, String) {
        let l = detect(LaunchOptions::default(), variables).unwrap().unwrap();
        (l.id, l.count, l.coordinator, l.how)
    }

    fn at(id: usize, count: usize, coordinator: &str, how: &str) -> (usize, usize, String, String) {
        (id, count, coordinator.into(), how.into())
    }

    #[test]
    fn no_launcher_means_a_single_process() {
        assert_eq!(detect(LaunchOptions::default(), &[]), Ok(None));
        assert_eq!(
            detect(LaunchOptions::default(), &[("TPU_WORKER_HOSTNAMES", "localhost"), ("TPU_WORKER_ID", "0")]),
            Ok(None)
        );
        // A SLURM batch script outside of srun.
        assert_eq!(detect(LaunchOptions::default(), &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), Ok(None));
        let alone = LaunchOptions { num_processes: Some(1), ..LaunchOptions::default() };
        assert_eq!(detect(alone, &[("LTX2_PROCESS_ID", "1"), ("LTX2_NUM_PROCESSES", "2")]), Ok(None));
    }

    #[test]
    fn launchers_are_detected_from_their_variables() {
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "16"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_STEP_NODELIST", "gpu[007-009,12]"),
            ("SLURM_JOB_ID", "4101"),
        ];
        assert_eq!(found(&slurm), at(3, 8, "gpu007:61445", "SLURM"));
        let mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")];
        assert_eq!(found(&mpi), at(1, 2, "127.0.0.1:61440", "Open MPI"));
        let jobset = [
            ("JOBSET_NAME", "video"),
            ("REPLICATED_JOB_NAME", "slice"),
            ("JOB_INDEX", "1"),
            ("JOBS_IN_SET", "2"),
            ("JOB_COMPLETION_INDEX", "1"),
            ("PROCESSES_IN_JOB", "4"),
        ];
        assert_eq!(found(&jobset), at(5, 8, "video-slice-0-0.video:8476", "Kubernetes JobSet"));
        let tpu = [("TPU_WORKER_ID", "1"), ("TPU_WORKER_HOSTNAMES", "a:8471:10.0.0.2, b:8471:10.0.0.3")];
        assert_eq!(found(&tpu), at(1, 2, "a:8476", "TPU_WORKER_ID"));
        let slices = [
            ("TPU_WORKER_ID", "1"),
            ("TPU_WORKER_HOSTNAMES", "c,d"),
            ("MEGASCALE_NUM_SLICES", "2"),
            ("MEGASCALE_SLICE_ID", "1"),
            ("MEGASCALE_COORDINATOR_ADDRESS", "a:8080"),
        ];
        assert_eq!(found(&slices), at(3, 4, "a:8476", "TPU_WORKER_ID"));
    }

    #[test]
    fn tpu_process_addresses_precede_worker_hostnames() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("addresses");
        std::fs::write(&path, "p:8471, q:8471,r:8471\n").unwrap();
        let file = ("TPU_PROCESS_ADDRESSES_PATH", path.to_str().unwrap());
        let (addresses, names) = (("TPU_PROCESS_ADDRESSES", "a:8471,b:8471"), ("TPU_WORKER_HOSTNAMES", "localhost"));
        let worker = ("TPU_WORKER_ID", "1");
        assert_eq!(found(&[worker, names, addresses, file]), at(1, 3, "p:8476", "TPU_WORKER_ID"));
        assert_eq!(found(&[worker, names, addresses]), at(1, 2, "a:8476", "TPU_WORKER_ID"));
        assert_eq!(
            found(&[worker, addresses, ("TPU_PROCESS_ADDRESSES_PATH", "")]),
            at(1, 2, "a:8476", "TPU_WORKER_ID")
        );
        // One process address means a single process, even with two host names.
        let alone = ("TPU_PROCESS_ADDRESSES", "localhost:8476");
        assert_eq!(detect(LaunchOptions::default(), &[("TPU_WORKER_HOSTNAMES", "a,b"), alone]), Ok(None));
        let slices = [("MEGASCALE_NUM_SLICES", "2"), ("MEGASCALE_SLICE_ID", "1")];
        assert_eq!(found(&[&[worker, addresses][..], &slices].concat()), at(3, 4, "a:8476", "TPU_WORKER_ID"));

        let error = |variables: &[(&str, &str)]| detect(LaunchOptions::default(), variables).unwrap_err();
        let missing = error(&[worker, addresses, ("TPU_PROCESS_ADDRESSES_PATH", "/no/such/file")]);
        assert!(missing.contains("(TPU_PROCESS_ADDRESSES_PATH): cannot read /no/such/file: "), "{missing}");
        std::fs::write(&path, " \n").unwrap();
        assert!(error(&[worker, addresses, file]).contains("is empty; write the addresses"));
        assert!(
            error(&[addresses]).contains("(TPU_WORKER_ID): the variable is not set, although TPU_PROCESS_ADDRESSES is")
        );
    }

    /// Uses the environment variables that libtpu documents for several processes on one host.
    #[test]
    fn tpu_processes_on_one_host_use_an_unlisted_port() {
        let addresses = ("TPU_PROCESS_ADDRESSES", "localhost:8476,localhost:8477");
        let task = ("CLOUD_TPU_TASK_ID", "1");
        assert_eq!(found(&[addresses, task]), at(1, 2, "localhost:8478", "TPU_WORKER_ID"));
        assert_eq!(found(&[addresses, task, ("TPU_WORKER_ID", "1")]), at(1, 2, "localhost:8478", "TPU_WORKER_ID"));
        let error = detect(LaunchOptions::default(), &[addresses, task, ("TPU_WORKER_ID", "0")]).unwrap_err();
        assert!(error.contains("(CLOUD_TPU_TASK_ID): the value is 1, but TPU_WORKER_ID is 0; unset one"), "{error}");
        let hosts = ["h", "h:1", "h:1:10.0.0.2", "[::1]:8476", "[::1]"];
        assert_eq!(hosts.map(host_of), ["h", "h", "h", "[::1]", "[::1]"]);
    }

    #[test]
    fn flags_override_the_launcher_and_missing_values_are_errors() {
        let all = LaunchOptions { coordinator: Some("h:1".into()), process_id: Some(0), num_processes: Some(2) };
        let launch = detect(all, &[("SLURM_PROCID", "1")]).unwrap().unwrap();
        assert_eq!((launch.id, launch.count, launch.coordinator.as_str()), (0, 2, "h:1"));
        let place = LaunchOptions { coordinator: Some("h".into()), ..LaunchOptions::default() };
        let mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")];
        assert_eq!(detect(place.clone(), &mpi).unwrap().unwrap().coordinator, "h:8476");
        let error = detect(LaunchOptions::default(), &mpi).unwrap_err();
        assert_eq!(
            error,
            "multi-process launch (Open MPI): cannot infer the coordinator; pass --coordinator HOST:PORT of process 0"
        );
        assert!(detect(place, &[]).unwrap_err().ends_with("cannot infer the process id; pass --process-id N"));
        let id = LaunchOptions { process_id: Some(1), ..LaunchOptions::default() };
        assert!(detect(id, &[]).unwrap_err().ends_with("cannot infer the number of processes; pass --num-processes N"));
        let beyond = LaunchOptions { coordinator: Some("h:1".into()), process_id: Some(2), num_processes: Some(2) };
        assert!(
            detect(beyond, &[]).unwrap_err().ends_with("process id 2 is out of range for 2 processes (ids start at 0)")
        );
        let odd = LaunchOptions { coordinator: Some("h:x".into()), process_id: Some(0), num_processes: Some(2) };
        assert!(detect(odd, &[]).unwrap_err().ends_with("coordinator 'h:x' is invalid; use the form HOST:PORT"));
        let odd = detect(LaunchOptions::default(), &[("LTX2_PROCESS_ID", "one")]).unwrap_err();
        assert_eq!(odd, "multi-process launch (LTX2_PROCESS_ID): 'one' is not a number");
    }

    #[test]
    fn incomplete_launcher_variables_are_errors() {
        let tpu = ("TPU_WORKER_HOSTNAMES", "a,b");
        let step = [("SLURM_STEP_NODELIST", "n[1-2]"), ("SLURM_NTASKS", "2"), ("SLURM_JOB_ID", "7")];
        let set = [
            ("JOBSET_NAME", "v"),
            ("REPLICATED_JOB_NAME", "s"),
            ("PROCESSES_IN_JOB", "2"),
            ("JOB_COMPLETION_INDEX", "0"),
        ];
        let cases = [
            (vec![tpu], "TPU_WORKER_ID", "the variable is not set, although TPU_WORKER_HOSTNAMES is"),
            (vec![tpu, ("TPU_WORKER_ID", "x")], "TPU_WORKER_ID", "'x' is not a number"),
            (
                vec![tpu, ("TPU_WORKER_ID", "0"), ("MEGASCALE_NUM_SLICES", "2")],
                "MEGASCALE_SLICE_ID",
                "the variable is not set, although MEGASCALE_NUM_SLICES is",
            ),
            (step.to_vec(), "SLURM_PROCID", "the variable is not set, although SLURM_STEP_NODELIST is"),
            (
                [&step[..2], &[("SLURM_PROCID", "1"), ("SLURM_JOB_ID", "7_1")]].concat(),
                "SLURM_JOB_ID",
                "'7_1' is not a number",
            ),
            (
                vec![("OMPI_COMM_WORLD_SIZE", "2")],
                "OMPI_COMM_WORLD_RANK",
                "the variable is not set, although OMPI_COMM_WORLD_SIZE is",
            ),
            ([&set[..], &[("JOBS_IN_SET", "two")]].concat(), "JOBS_IN_SET", "'two' is not a number"),
            (
                [&set[..], &[("JOBS_IN_SET", "2")]].concat(),
                "JOB_INDEX",
                "the variable is not set, although REPLICATED_JOB_NAME is",
            ),
        ];
        let alone = LaunchOptions { num_processes: Some(1), ..LaunchOptions::default() };
        let whole = LaunchOptions { coordinator: Some("h:1".into()), process_id: Some(0), num_processes: Some(2) };
        for (variables, name, why) in cases {
            let error = detect(LaunchOptions::default(), &variables).unwrap_err();
            assert!(error.starts_with(&format!("multi-process launch ({name}): {why}")), "{error}");
            assert_eq!(detect(alone.clone(), &variables), Ok(None), "{name}");
            assert_eq!(detect(whole.clone(), &variables).unwrap().unwrap().coordinator, "h:1", "{name}");
        }
        // LTX2_* variables count like flags.
        let own = [("LTX2_PROCESS_ID", "0"), ("LTX2_COORDINATOR", "h:1"), ("TPU_WORKER_HOSTNAMES", "a,b")];
        let two = LaunchOptions { num_processes: Some(2), ..LaunchOptions::default() };
        assert_eq!(detect(two, &own).unwrap().unwrap().coordinator, "h:1");
        assert_eq!(detect(LaunchOptions::default(), &[own[2], ("LTX2_NUM_PROCESSES", "1")]), Ok(None));
        // Without a job number, the coordinator has no default port.
        let unnumbered = [&step[..2], &[("SLURM_PROCID", "1")]].concat();
        let error = detect(LaunchOptions::default(), &unnumbered).unwrap_err();
        assert!(error.starts_with("multi-process launch (SLURM): cannot infer the coordinator;"), "{error}");
        let place = LaunchOptions { coordinator: Some("h:1".into()), ..LaunchOptions::default() };
        assert_eq!(detect(place, &unnumbered).unwrap().unwrap().id, 1);
        // The index refers to a second job or slice, although the count is 1.
        for second in
            [[&set[..], &[("JOB_INDEX", "1")]].concat(), vec![tpu, ("TPU_WORKER_ID", "0"), ("MEGASCALE_SLICE_ID", "1")]]
        {
            let error = detect(LaunchOptions::default(), &second).unwrap_err();
            assert!(error.ends_with("process id 2 is out of range for 2 processes (ids start at 0)"), "{error}");
        }
        // A single TPU worker, and a JobSet that does not set its number of processes, run as single processes.
        assert_eq!(detect(LaunchOptions::default(), &[("TPU_WORKER_HOSTNAMES", "localhost")]), Ok(None));
        assert_eq!(detect(LaunchOptions::default(), &set[..2]), Ok(None));
    }

    #[test]
    fn slurm_node_list_yields_its_first_host() {
        let cases = [
            ("n1", "n1"),
            ("n1,n2", "n1"),
            ("n[1-4]", "n1"),
            ("n[003,5-6]-ib,m1", "n003-ib"),
            ("m1,n[1-2]", "m1"),
            ("a-b-[07-09]", "a-b-07"),
        ];
        for (list, first) in cases {
            assert_eq!(first_host(list), first, "{list}");
        }
    }
}
