//! Cluster of the stand-in `kubectl`: checks the manifest of a JobSet against the node pools, buckets and images, and
//! writes a folder for each pod that it creates.

use std::fs;
use std::path::PathBuf;

use crate::support::needs;
use serde_json::Value;

/// Folder of the rehearsal, which also contains the buckets, images and node pools.
struct Cluster(PathBuf);

/// Manifest of the pods, which have a single container.
struct Pods<'a> {
    /// Specs of the job, of its pods, and of their container.
    job: &'a Value,
    pod: &'a Value,
    container: &'a Value,
}

/// Implements `kubectl apply -f -` for `cluster/manifest.yml`.
#[needs(member)]
fn kubectl_apply_creates_pods() {
    let cluster = Cluster(PathBuf::from(std::env::var_os("STANDIN").expect("a folder")));
    let set: Value = serde_saphyr::from_str(&cluster.read("cluster/manifest.yml")).expect("YAML");
    assert!(cluster.0.join("cluster/jobsets").exists(), "no matches for kind JobSet");
    assert_eq!((&set["apiVersion"], &set["kind"]), (&"jobset.x-k8s.io/v1alpha2".into(), &"JobSet".into()));
    let name = text(&set["metadata"]["name"]);
    let jobs = set["spec"]["replicatedJobs"].as_array().expect("replicatedJobs");
    let [replicated] = &jobs[..] else { panic!("one replicated job: {jobs:?}") };
    let (replicas, job) = (number(&replicated["replicas"]), &replicated["template"]["spec"]);
    let pod = &job["template"]["spec"];
    let [container] = &pod["containers"].as_array().expect("containers")[..] else { panic!("one container") };
    let pods = Pods { job, pod, container };
    pods.have_known_fields();

    let nodes = cluster.nodes(&pods, replicas);
    let folder = cluster.working_folder(&pods);
    let words = cluster.words(&pods);
    for (index, pod) in (0..replicas).flat_map(|job| (0..nodes).map(move |pod| (job, pod))) {
        let variables = pods.variables([name, text(&replicated["name"])], index, pod);
        for (key, wanted) in [("PROCESSES_IN_JOB", nodes), ("JOBS_IN_SET", replicas)] {
            assert!(variables.contains(&format!("{key}={wanted}")), "{key} is not {wanted}: {variables:?}");
        }
        let at = cluster.0.join(format!("cluster/pods/{name}-{}-{index}-{pod}", text(&replicated["name"])));
        fs::create_dir_all(&at).expect("a folder");
        fs::write(at.join("folder"), folder.display().to_string()).expect("written");
        fs::write(at.join("variables"), variables.join("\n")).expect("written");
        fs::write(at.join("words"), words.join("\n")).expect("written");
    }
    fs::write(cluster.0.join("cluster/name"), name).expect("written");
}

impl Cluster {
    fn read(&self, below: &str) -> String {
        fs::read_to_string(self.0.join(below)).unwrap_or_else(|e| panic!("{below}: {e}"))
    }

    /// Returns the number of nodes of a slice: one pod per host, with all chips of the host.
    fn nodes(&self, pods: &Pods, replicas: usize) -> usize {
        let wanted = &pods.pod["nodeSelector"];
        let topology = text(&wanted["cloud.google.com/gke-tpu-topology"]);
        assert_eq!(text(&wanted["cloud.google.com/gke-tpu-accelerator"]), "tpu-v6e-slice");
        let files = fs::read_dir(self.0.join("cluster")).expect("a cluster").flatten().map(|entry| entry.path());
        let files = files.filter(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("pool-")));
        let pools: Vec<Vec<String>> = files
            .map(|path| fs::read_to_string(path).expect("a pool").split_whitespace().map(String::from).collect())
            .filter(|pool: &Vec<String>| pool[0].starts_with("ct6e-standard-") && pool[1] == topology)
            .collect();
        assert_eq!(pools.len(), replicas, "a node pool of topology {topology} for each slice");
        let chips = pools[0][0].trim_start_matches("ct6e-standard-").trim_end_matches('t').parse::<usize>();
        let chips = chips.expect("chips of a machine");
        let nodes = topology.split('x').map(|n| n.parse::<usize>().expect("a topology")).product::<usize>() / chips;
        assert_eq!(pools[0][2], nodes.to_string(), "nodes of a pool with topology {topology}, {chips} chips each");
        let limit = number(&pods.container["resources"]["limits"]["google.com/tpu"]);
        assert_eq!(limit, chips, "all chips of a node");
        assert_eq!(
            (number(&pods.job["parallelism"]), number(&pods.job["completions"])),
            (nodes, nodes),
            "a pod a node"
        );
        nodes
    }

    /// Returns the working folder of the container: in the mounted bucket, which the service account must be able to
    /// access.
    fn working_folder(&self, pods: &Pods) -> PathBuf {
        let annotation = &pods.job["template"]["metadata"]["annotations"]["gke-gcsfuse/volumes"];
        assert_eq!(annotation, "true", "the sidecar that mounts buckets");
        assert!(self.read("cluster/about").contains("GcsFuseCsiDriver"), "the driver is not in the cluster");
        let account = text(&pods.pod["serviceAccountName"]);
        let accounts = self.read("cluster/accounts");
        assert!(accounts.lines().any(|known| known == account), "serviceaccount {account} not found");
        let [volume] = &pods.pod["volumes"].as_array().expect("volumes")[..] else { panic!("one volume") };
        let [mount] = &pods.container["volumeMounts"].as_array().expect("mounts")[..] else { panic!("one mount") };
        let driver = &"gcsfuse.csi.storage.gke.io".into();
        assert_eq!((&mount["name"], &volume["csi"]["driver"]), (&volume["name"], driver));
        let attributes = &volume["csi"]["volumeAttributes"];
        let bucket = text(&attributes["bucketName"]);
        assert!(text(&attributes["mountOptions"]).contains("implicit-dirs"), "folders are not seen");
        let member = format!(
            "gs://{bucket} roles/storage.objectUser principal://iam.googleapis.com/projects/1234/locations/global/\
             workloadIdentityPools/{}.svc.id.goog/subject/ns/default/sa/{account}",
            self.read("project").trim()
        );
        let bindings = self.read("bindings");
        assert!(bindings.lines().any(|line| line == member), "{account} may not use {bucket}: {bindings}");
        let folder = self.0.join("buckets").join(bucket);
        assert!(folder.is_dir(), "bucket {bucket} not found");
        match text(&pods.container["workingDir"]).strip_prefix(text(&mount["mountPath"])) {
            Some(below) => folder.join(below.trim_start_matches('/')),
            None => panic!("the pod does not start in the mounted bucket"),
        }
    }

    /// Returns the command: a program of a pushed image, and its arguments.
    fn words(&self, pods: &Pods) -> Vec<String> {
        let image = text(&pods.container["image"]).replace('/', "_");
        let images = self.0.join("images");
        assert!(images.join(format!("{image}.pushed")).exists(), "image {image} cannot be pulled");
        let list = |key: &str| -> Vec<String> {
            pods.container[key].as_array().into_iter().flatten().map(|word| text(word).to_string()).collect()
        };
        let mut words = match list("command") {
            command if command.is_empty() => vec![self.read(&format!("images/{image}.entrypoint")).trim().to_string()],
            command => command,
        };
        words[0] = format!("{}{}", images.join(&image).display(), words[0]);
        words.extend(list("args"));
        words
    }
}

impl Pods<'_> {
    /// Rejects fields that the server would reject.
    fn have_known_fields(&self) {
        let pod = [
            "restartPolicy",
            "serviceAccountName",
            "nodeSelector",
            "containers",
            "volumes",
            "hostNetwork",
            "dnsPolicy",
        ];
        let container = ["name", "image", "workingDir", "command", "args", "env", "ports", "resources", "volumeMounts"];
        for (value, known) in [(self.pod, &pod[..]), (self.container, &container[..])] {
            let fields = value.as_object().expect("fields");
            fields.keys().for_each(|field| assert!(known.contains(&field.as_str()), "unknown field \"{field}\""));
        }
        assert_eq!(text(&self.pod["restartPolicy"]), "Never", "the processes of a job end together");
    }

    /// Returns the environment of a pod, with an address instead of the DNS name of another pod.
    fn variables(&self, [set, job]: [&str; 2], index: usize, pod: usize) -> Vec<String> {
        let of_field = |path: &str| match path {
            "metadata.annotations['jobset.sigs.k8s.io/jobset-name']" => set.to_string(),
            "metadata.annotations['jobset.sigs.k8s.io/replicatedjob-name']" => job.to_string(),
            "metadata.annotations['jobset.sigs.k8s.io/job-index']" => index.to_string(),
            "metadata.annotations['batch.kubernetes.io/job-completion-index']" => pod.to_string(),
            other => panic!("a pod has no {other}"),
        };
        let variables = self.container["env"].as_array().into_iter().flatten().map(|variable| {
            let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
                Some(path) => of_field(path),
                None => text(&variable["value"]).to_string(),
            };
            format!("{}={value}", text(&variable["name"]))
        });
        let network = std::env::var("STANDIN_NETWORK").expect("a network");
        variables.chain([format!("LTX2_COORDINATOR={network}.9:8476")]).collect()
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("a text, not {value}"))
}

fn number(value: &Value) -> usize {
    value.as_u64().and_then(|n| n.try_into().ok()).unwrap_or_else(|| panic!("a number, not {value}"))
}
