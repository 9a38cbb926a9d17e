//! Prompt enhancement: by a stand-in chat server and by the text encoder, with dry runs, sidecars, repeated and resumed
//! runs, and refusals.

use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::generate::{fail, text};
use crate::support::chat::{Answer, ChatServer};
use crate::support::{self, needs};
use ltx2::config::{CliOverrides, load};
use ltx2::pipeline::generate::{FinishedVideo, Observer, generate};
use ltx2::pipeline::phase::Phase;
use ltx2::pipeline::plan::options::GenerateOptions;
use ltx2::pipeline::plan::videos::Job;
use serde_json::{Value, json};

const TINY: &str = "tests/fixtures/tiny.yml";
const KEY: &str = "sk-secret-4711";

/// Runs `ltx2 generate` with these arguments and configuration keys, and an API key in the environment.
fn run(arguments: &[&str], keys: &[String]) -> Output {
    run_with(arguments, keys, &[])
}

/// Same as [`run`], with these environment variables.
fn run_with(arguments: &[&str], keys: &[String], variables: &[(&str, &str)]) -> Output {
    let mut command = support::ltx2();
    command.arg("generate").args(arguments).args(keys.iter().flat_map(|pair| ["--set", pair]));
    support::without_proxies(command.env("TEST_CHAT_KEY", KEY)).envs(variables.iter().copied());
    command.output().expect("the binary runs")
}

fn succeed(arguments: &[&str], keys: &[String]) -> String {
    let ran = run(arguments, keys);
    assert!(ran.status.success(), "{arguments:?} {keys:?}: {}", text(&ran.stderr));
    text(&ran.stdout)
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("a file")).expect("JSON")
}

fn utf8(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Copies the smallest model, with turn tokens of Gemma 3 in the tokenizer if `has_turns` is set.
fn copy_model(folder: &Path, has_turns: bool) -> String {
    let model = folder.join("model");
    let copied = Command::new("/bin/cp").args(["-r", "tests/fixtures/models/tiny_a"]).arg(&model).status();
    assert!(copied.expect("cp runs").success());
    if has_turns {
        let path = model.join("tokenizer/tokenizer.json");
        let tokens = std::fs::read_to_string(&path).expect("a tokenizer");
        let tokens = tokens.replace("<start_of_image>", "<start_of_turn>").replace("<end_of_image>", "<end_of_turn>");
        std::fs::write(path, tokens).expect("written");
    }
    utf8(&model).to_string()
}

#[needs(nothing)]
fn dry_run_asks_endpoint_once_per_distinct_prompt() {
    let folder = tempfile::tempdir().expect("a folder");
    let prompts = folder.path().join("prompts.txt");
    std::fs::write(&prompts, "a fox\na dog\na fox\n").expect("written");
    let server = ChatServer::start([
        Answer::Text("**Here \u{2014} a \u{201c}red\u{201d} fox\u{2019}s den.\n"),
        Answer::Text("A dog."),
    ]);
    let dry = ["-c", TINY, "--prompts", utf8(&prompts), "--num-videos", "2", "--enhance-prompt", "--dry-run"];
    let keys = server.keys("enhance.key_env=TEST_CHAT_KEY");
    assert_eq!(succeed(&dry, &keys), "Here - a \"red\" fox's den.\nA dog.\n");
    let requests = server.requests();
    assert_eq!(requests.len(), 2, "{requests:?}");
    let first = &requests[0];
    assert!(first.head.starts_with("POST /v1/chat/completions HTTP/1.1\r\n"), "{}", first.head);
    assert!(first.head.to_lowercase().contains(&format!("authorization: bearer {KEY}\r\n")), "{}", first.head);
    let messages = &first.body["messages"];
    let built_in = include_str!("../../prompts/t2v.txt");
    assert_eq!(messages[0], json!({"role": "system", "content": built_in.trim()}));
    assert_eq!(messages[1], json!({"role": "user", "content": "user prompt: a fox"}));
    assert_eq!((&first.body["model"], &first.body["max_tokens"]), (&json!("stand-in"), &json!(512)));
    assert_eq!((first.body.get("temperature"), first.body.get("top_p"), &first.body["seed"]), (None, None, &json!(10)));

    // The system prompt is a file, greedy requests have no seed, and no key is sent without enhance.key_env.
    let system = folder.path().join("system.txt");
    std::fs::write(&system, "Be brief.\n").expect("written");
    let dry = ["-c", TINY, "-p", "a cat", "--enhance-prompt", "--enhance-system", utf8(&system), "--dry-run", "--json"];
    let plan: Value = serde_json::from_str(&succeed(&dry, &server.keys("enhance.temperature=0"))).expect("JSON");
    assert_eq!(plan["prompts"], json!([{"prompt": "a cat", "enhanced": "A dog.", "seed": 10}]));
    let request = server.requests().pop().expect("a request");
    assert_eq!((&request.body["messages"][0]["content"], &request.body["seed"]), (&json!("Be brief."), &Value::Null));
    assert!(!request.head.to_lowercase().contains("authorization"), "{}", request.head);
    assert_eq!(request.body["temperature"], json!(0.0));

    // A server that refuses max_tokens gets the newer option; a seed fits in a signed number; reasoning is removed.
    let refusal =
        json!({"error": {"message": "'max_tokens' is not supported; use 'max_completion_tokens'"}}).to_string();
    let newer =
        ChatServer::start([Answer::Raw("400 Bad Request", refusal), Answer::Text("<think>Hm.</think>\nA cat.")]);
    let keys = [&newer.keys("enhance.top_p=0.5")[..], &["enhance.seed=18446744073709551615".into()]].concat();
    assert_eq!(succeed(&["-c", TINY, "-p", "a cat", "--enhance-prompt", "--dry-run"], &keys), "A cat.\n");
    let requests = newer.requests();
    let options = |at: usize| ["max_tokens", "max_completion_tokens"].map(|key| requests[at].body.get(key).cloned());
    assert_eq!((requests.len(), options(0), options(1)), (2, [Some(json!(512)), None], [None, Some(json!(512))]));
    assert_eq!((&requests[1].body["top_p"], &requests[1].body["seed"]), (&json!(0.5), &json!(i64::MAX)));

    // The model's folder may have the system prompt. With images, another one is used, and a warning says that the chat
    // server does not see them.
    let model = copy_model(folder.path(), false);
    std::fs::write(Path::new(&model).join("text_encoder/enhance_t2v.txt"), "Be vivid.\n").expect("written");
    let keys = server.keys(&format!("model.path={model}"));
    succeed(&["-c", TINY, "-p", "a cat", "--enhance-prompt", "--dry-run"], &keys);
    let own = server.requests().pop().expect("a request").body;
    assert_eq!(own["messages"][0]["content"], json!("Be vivid."));
    let image = ["--pipeline", "image_to_video", "--image", "tests/fixtures/images/shapes.png", "0", "1"];
    let ran = run(&[&["-c", TINY, "-p", "a cat", "--enhance-prompt", "--dry-run"], &image[..]].concat(), &keys);
    let said = text(&ran.stderr);
    assert!(ran.status.success() && said.contains("prompts are enhanced without the images: "), "{said}");
    let own = server.requests().pop().expect("a request").body;
    let built_in = include_str!("../../prompts/i2v.txt");
    assert_eq!(own["messages"][0]["content"], json!(built_in.trim()));
    assert_eq!(own["messages"][1]["content"], json!("User Raw Input Prompt: a cat."));

    // Without request.enhance_prompt, the endpoint of a file is not contacted.
    let file = folder.path().join("own.yml");
    let own =
        format!("extends: {}/{TINY}\nenhance: {{endpoint: '{}', model: m}}\n", env!("CARGO_MANIFEST_DIR"), server.base);
    std::fs::write(&file, own).expect("written");
    succeed(&["-c", utf8(&file), "-p", "a cat", "--dry-run"], &[]);
    assert!(server.requests().is_empty());
}

#[needs(nothing)]
fn endpoint_faults_are_one_line_with_a_remedy() {
    let elsewhere = ChatServer::start([Answer::Text("stolen")]);
    let not_utf8 = vec![b'"', 0xff, b'"'];
    let wrong = |body: Value| Answer::Raw("200 OK", body.to_string());
    let error = |message: &str| json!({"error": {"message": message, "type": "x"}}).to_string();
    let server = ChatServer::start([Answer::Text("")]);
    for (answer, wanted) in [
        (Answer::Silence(Duration::from_secs(3)), "no answer within 1 s; raise enhance.timeout"),
        (
            Answer::Raw("200 OK", "<html>hello</html>".into()),
            "the answer is not JSON: <html>hello</html>; enhance.endpoint must",
        ),
        (Answer::Raw("200 OK", "a".repeat((1 << 20) + 1)), "the answer is larger than 1 MiB; enhance.endpoint must"),
        (Answer::Bytes(not_utf8), "the answer is not UTF-8; enhance.endpoint must"),
        (wrong(json!({"object": "list"})), "the answer has no choices: {\"object\":\"list\"}; enhance.endpoint must"),
        (wrong(json!({"choices": [{"message": {"content": 3}}]})), "the answer's first choice has no text: "),
        (Answer::Text(" \n"), "the model stand-in returned an empty answer; rephrase the prompt"),
        (
            wrong(json!({"choices": [{"message": {"content": null}, "finish_reason": "length"}]})),
            "raise enhance.max_new_tokens",
        ),
        (Answer::Text("<think>The user wants a fox"), "the model stand-in used all tokens before its answer; raise"),
        (Answer::Text("<|channel>thought\nA fox"), "the model stand-in used all tokens before its answer; raise"),
        (Answer::Text("<think>A fox?</think>\n"), "the model stand-in returned an empty answer; rephrase the prompt"),
        (
            Answer::Raw("400 Bad Request", error("max_tokens is too large: 512")),
            "400 Bad Request: max_tokens is too large: 512; correct enhance.endpoint",
        ),
        (
            Answer::Raw("401 Unauthorized", error(&format!("Incorrect API key\nprovided: {KEY}"))),
            "401 Unauthorized: Incorrect API key provided: [key]; put a valid API key into the environment variable \
             TEST_CHAT_KEY (enhance.key_env)",
        ),
        (
            Answer::Raw("404 Not Found", error("no such model")),
            "404 Not Found: no such model; enhance.endpoint must be the base URL of an OpenAI-compatible chat API that has \
             the model stand-in",
        ),
        (
            Answer::Raw("429 Too Many Requests", error("slow down")),
            "slow down; the server limits requests; try again later",
        ),
        (
            Answer::Raw("500 Internal Server Error", "{\"detail\": \"out of\\nmemory\"}".into()),
            "500 Internal Server Error: out of memory; the server failed; see its log",
        ),
        (Answer::Redirect(format!("{}/chat/completions", elsewhere.base)), "redirects are not followed"),
    ] {
        server.answer(answer);
        let keys = [server.keys("enhance.key_env=TEST_CHAT_KEY").to_vec(), vec!["enhance.timeout=1".into()]].concat();
        let begun = Instant::now();
        let ran = run(&["-c", TINY, "-p", "a fox", "--enhance-prompt", "--dry-run"], &keys);
        let said = text(&ran.stderr);
        let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
        let [line] = errors[..] else { panic!("{said}") };
        assert_eq!(ran.status.code(), Some(1), "{said}");
        assert!(
            line.contains(&format!("{}/chat/completions: ", server.base)) && line.contains(wanted),
            "{wanted}: {line}"
        );
        assert!(!said.contains(KEY) && text(&ran.stdout).is_empty(), "{said}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{wanted}");
    }
    assert!(elsewhere.requests().is_empty());
    let keys = ["enhance.endpoint=http://127.0.0.1:9/v1".to_string(), "enhance.model=m".into()];
    let ran = run(&["-c", TINY, "-p", "a fox", "--enhance-prompt", "--dry-run"], &keys);
    let said = text(&ran.stderr);
    assert!(
        said.contains("http://127.0.0.1:9/v1/chat/completions: ") && said.contains("; start the server, or"),
        "{said}"
    );
}

/// The stand-in for a proxy answers like the endpoint, so a request through it would succeed.
#[needs(nothing)]
fn proxies_are_not_used_for_loopback_endpoints_and_named_in_errors() {
    let (server, proxy) = (ChatServer::start([Answer::Text("A fox.")]), ChatServer::start([Answer::Text("A dog.")]));
    let place = proxy.base.trim_end_matches("/v1");
    let dry = ["-c", TINY, "-p", "a fox", "--enhance-prompt", "--dry-run"];
    let port = server.base.trim_end_matches("/v1").rsplit(':').next().expect("a port").to_string();
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
        for host in ["127.0.0.1", "localhost"] {
            let endpoint = format!("enhance.endpoint=http://{host}:{port}/v1");
            let ran = run_with(&dry, &[endpoint, "enhance.model=m".into()], &[(name, place)]);
            assert_eq!(text(&ran.stdout), "A fox.\n", "{name} {host}: {}", text(&ran.stderr));
        }
    }
    assert!(proxy.requests().is_empty());
    assert_eq!(server.requests().len(), 12);
    let keys = ["enhance.endpoint=http://chat.invalid/v1".to_string(), "enhance.model=m".into()];
    let ran = run_with(&dry, &keys, &[("HTTP_PROXY", "http://me:sesame@127.0.0.1:9")]);
    let said = text(&ran.stderr);
    assert!(said.contains("http://chat.invalid/v1/chat/completions: through the proxy 127.0.0.1:9: "), "{said}");
    assert!(said.contains("or correct enhance.endpoint or the proxy variables") && !said.contains("sesame"), "{said}");
}

#[needs(nothing)]
fn unusable_enhancement_settings_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = copy_model(folder.path(), true);
    let generation = Path::new(&model).join("text_encoder/generation_config.json");
    std::fs::remove_file(&generation).expect("removed");
    let own_model = format!("model.path={model}");
    let endpoint = "enhance.endpoint=http://localhost:1/v1";
    let empty = folder.path().join("empty.txt");
    std::fs::write(&empty, " \n").expect("written");
    let system = format!("enhance.system={}", empty.display());
    for (code, set, wanted) in [
        (
            1,
            &["request.enhance_prompt=true"][..],
            "tokenizer lacks the token `<start_of_turn>` of Gemma 3's chat format",
        ),
        (
            1,
            &["request.enhance_prompt=true", &own_model],
            "generation_config.json: this file is missing, so the text encoder",
        ),
        (2, &["request.enhance_prompt=true", endpoint], "set enhance.model to the name of the endpoint's model"),
        (2, &["request.enhance_prompt=true", "enhance.endpoint=localhost"], "must be the base URL of a chat server"),
        (
            2,
            &["request.enhance_prompt=true", "enhance.endpoint=http://user:sesame@host/v1"],
            "enhance.endpoint = http://host/v1 (--set): must not contain credentials",
        ),
        (
            2,
            &["request.enhance_prompt=true", endpoint, "enhance.model=m", "enhance.key_env=NO_SUCH_KEY"],
            "the environment variable NO_SUCH_KEY is not set, empty or not UTF-8; set it to the API key of http://localhost:1/v1",
        ),
        (
            2,
            &["request.enhance_prompt=true", endpoint, "enhance.model=m", "enhance.key_env=sk-sesame"],
            "enhance.key_env = 9 characters (--set): must be the name of an environment variable, not the key",
        ),
        (2, &["request.enhance_prompt=true", "request.prompt=''"], "an empty prompt cannot be enhanced"),
        (1, &["request.enhance_prompt=true", endpoint, "enhance.model=m", &system], "empty.txt: the system prompt"),
        (
            2,
            &["enhance.seed=3"],
            "enhance.seed = 3 (--set): prompts are not enhanced; set request.enhance_prompt to true",
        ),
        (
            2,
            &["request.enhance_prompt=true", "enhance.timeout=3"],
            "only chat servers use this key; set enhance.endpoint",
        ),
        (
            2,
            &["request.enhance_prompt=true", endpoint, "enhance.model=m", "enhance.top_k=3"],
            "the protocol of enhance.endpoint has no such option",
        ),
        (
            2,
            &["request.enhance_prompt=true", "enhance.temperature=0", "enhance.top_p=0.5"],
            "the most likely token is always selected",
        ),
    ] {
        let pairs = set.iter().flat_map(|pair| ["--set", pair]);
        let arguments: Vec<&str> = ["generate", "-c", TINY, "--dry-run"].into_iter().chain(pairs).collect();
        let said = fail(code, &arguments);
        assert!(said.contains(wanted) && !said.contains("sesame"), "{set:?}: {said}");
    }
    let said =
        fail(2, &["bench", "-c", TINY, "--set", "request.enhance_prompt=true", "--set", "enhance.max_new_tokens=9"]);
    assert!(said.contains("this command does not enhance prompts"), "{said}");
}

/// Each run with this model compiles text generation with the same sizes.
#[needs(cpu)]
fn text_encoder_run_uses_the_prompts_of_its_dry_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let model = copy_model(folder.path(), true);
    std::fs::write(at("system.txt"), "Be brief.\n").expect("written");
    std::fs::write(at("prompts.txt"), "a fox\na dog\n").expect("written");
    let system = utf8(&at("system.txt")).to_string();
    let keys = [
        format!("model.path={model}"),
        "request.enhance_prompt=true".into(),
        "enhance.max_new_tokens=12".into(),
        format!("enhance.system={system}"),
        format!("runtime.compile_cache={}", support::programs().display()),
    ];
    let prompts = utf8(&at("prompts.txt")).to_string();
    let both = ["-c", support::tiny(), "--prompts", &prompts];
    let plan = |arguments: &[&str], keys: &[String]| -> Value {
        let dry = succeed(&[arguments, &["--dry-run", "--json"]].concat(), keys);
        serde_json::from_str::<Value>(&dry).expect("JSON")["prompts"].clone()
    };
    let planned = plan(&both, &keys);
    let all = planned.as_array().expect("prompts");
    assert_eq!([&all[0]["prompt"], &all[1]["prompt"]], [&json!("a fox"), &json!("a dog")]);
    assert_ne!(all[0]["enhanced"], all[1]["enhanced"]);

    succeed(&[&both[..], &["-o", utf8(&at("videos"))]].concat(), &keys);
    let sidecar = |name: &str| json_of(&at("videos").join(name));
    let runs = [sidecar("0000_10.json"), sidecar("0001_10.json")];
    for (run, own) in runs.iter().zip(all) {
        assert_eq!(run["enhancement"]["prompts"], json!([own]));
        let request = &run["config"]["request"];
        assert_eq!((&request["prompt"], &request["enhance_prompt"]), (&own["enhanced"], &json!(false)));
    }
    // Both prompts are enhanced before the first video.
    let took = runs.each_ref().map(|run| run["timings"]["prompt_enhancer"].as_f64().is_some_and(|took| took > 0.0));
    assert_eq!(took, [true, false]);
    // A sidecar lists the programs since the sidecar before it.
    assert!(!runs[0]["programs"]["prompt_enhancer"].is_null(), "{}", runs[0]["programs"]);
    let enhancer = &runs[0]["enhancement"]["enhancer"];
    assert_eq!((&enhancer["max_new_tokens"], &enhancer["temperature"]), (&json!(12), &json!(0.7)));
    assert_ne!(runs[0]["sha256"], runs[1]["sha256"]);

    // A repeated run has the same bits and the same record, and generates no text.
    succeed(&["-c", utf8(&at("videos/0001_10.json")), "-o", utf8(&at("again.mp4"))], &[]);
    let again = json_of(&at("again.json"));
    assert_eq!((&again["sha256"], &again["enhancement"]), (&runs[1]["sha256"], &runs[1]["enhancement"]));
    assert_eq!(again["programs"].get("prompt_enhancer"), None);

    // The prompts of later clips are enhanced too, and an enhanced prompt does not depend on the other prompts.
    let mut chained = keys.to_vec();
    chained.extend(["request.num_frames=25".into(), "request.chain={clip: 17, overlap: 9, prompts: [a dog]}".into()]);
    assert_eq!(plan(&["-c", support::tiny(), "-p", "a fox"], &chained), planned);

    // An interrupted run resumes with the prompt of its checkpoint. A changed system prompt is enhanced again.
    let output = at("steps.mp4");
    let run = |resume: bool, stop: Option<usize>| {
        let set = keys.iter().cloned().chain(["request.prompt=a fox".into()]).collect();
        let given = CliOverrides { files: vec![support::tiny().into()], set, ..CliOverrides::default() };
        let mut config = load(&given).expect("a configuration").config;
        config.output.path = Some(utf8(&output).into());
        config.sampler.progress_every = ltx2::config::ProgressEvery::Steps(1);
        let options = GenerateOptions { checkpoint_every: Some(1), resume, ..GenerateOptions::default() };
        let made = generate(&config, options, None, &mut Interrupt(stop)).map_err(|error| error.to_string());
        made.map(|made| made[0].frames_sha256.clone())
    };
    assert!(run(false, Some(2)).expect_err("interrupted").starts_with("interrupted after"));
    std::fs::write(&system, "Be long.\n").expect("written");
    let error = run(true, None).expect_err("another request");
    assert!(error.contains("prompt"), "{error}");
    std::fs::write(&system, "Be brief.\n").expect("written");
    assert_eq!(json!(run(true, None).expect("resumes")), runs[0]["sha256"]["frames"]);
    assert_eq!(json_of(&at("steps.json"))["enhancement"], runs[0]["enhancement"]);
}

/// Interrupts a run after a number of denoising steps.
struct Interrupt(Option<usize>);

impl Observer for Interrupt {
    fn progress(&mut self, _: &[Job], phase: Phase, done: usize, _: usize) -> ControlFlow<()> {
        let is_end = phase == Phase::Denoise && self.0 == Some(done);
        if is_end { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn finished(&mut self, _: &FinishedVideo, _: &str) {}
}

#[needs(cpu)]
fn repeated_and_resumed_runs_use_recorded_prompts() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let server = ChatServer::start([Answer::Text("A \u{201c}red\u{201d} fox.")]);
    let keys = server.keys("enhance.key_env=TEST_CHAT_KEY").to_vec();
    let (first, again) = (at("first.mp4"), at("again.mp4"));
    let ran = run(&["-c", support::tiny(), "-p", "a fox", "--enhance-prompt", "-o", utf8(&first)], &keys);
    let said = text(&ran.stderr);
    assert!(
        ran.status.success() && said.contains("enhancing the prompt") && said.contains("prompt enhancer "),
        "{said}"
    );
    let sidecar = json_of(&at("first.json"));
    let took = |sidecar: &Value| sidecar["timings"]["prompt_enhancer"].as_f64().is_some_and(|took| took > 0.0);
    assert!(took(&sidecar), "{}", sidecar["timings"]);
    let request = &sidecar["config"]["request"];
    assert_eq!((&request["prompt"], &request["enhance_prompt"]), (&json!("A \"red\" fox."), &json!(false)));
    let record = &sidecar["enhancement"];
    assert_eq!(record["prompts"], json!([{"prompt": "a fox", "enhanced": "A \"red\" fox.", "seed": 10}]));
    let enhancer = &record["enhancer"];
    assert_eq!((&enhancer["endpoint"], &enhancer["model"]), (&json!(server.base), &json!("stand-in")));
    assert!(!sidecar.to_string().contains(KEY));
    assert_eq!(server.requests().len(), 1);

    // A repeated run has the same bits and the same record, and sends no request.
    succeed(&["-c", utf8(&at("first.json")), "-o", utf8(&again)], &[]);
    let repeated = json_of(&at("again.json"));
    assert_eq!((&repeated["sha256"], &repeated["enhancement"]), (&sidecar["sha256"], record));
    assert!(!took(&repeated) && server.requests().is_empty());
    // An enhanced prompt is not enhanced again, but the original one.
    let enhanced = succeed(&["-c", utf8(&at("first.json")), "--enhance-prompt", "--dry-run"], &[]);
    assert_eq!(enhanced, "A \"red\" fox.\n");
    let request = server.requests().pop().expect("a request");
    assert_eq!(request.body["messages"][1]["content"], json!("user prompt: a fox"));
    // So has a run with the enhanced prompt.
    let plain = at("plain.mp4");
    succeed(&["-c", support::tiny(), "-p", "A \"red\" fox.", "-o", utf8(&plain)], &[]);
    let plain = json_of(&at("plain.json"));
    assert_eq!((&plain["sha256"], plain.get("enhancement")), (&sidecar["sha256"], None));
    // A finished video is not generated again, although the answer would be different.
    server.answer(Answer::Text("A blue fox."));
    let resumed = ["-c", support::tiny(), "-p", "a fox", "--enhance-prompt", "--resume", "-o", utf8(&first)];
    assert_eq!(succeed(&resumed, &keys), "");
    let without_key = [keys[0].as_str(), keys[1].as_str(), "request.prompt=a fox", "request.enhance_prompt=true"];

    // An interrupted run resumes with the prompt of its checkpoint.
    let output = at("steps.mp4");
    let cache = format!("runtime.compile_cache={}", support::programs().display());
    let run = |resume: bool, at: Option<usize>| {
        let set = without_key.into_iter().chain([cache.as_str()]).map(String::from).collect();
        let given = CliOverrides { files: vec![support::tiny().into()], set, ..CliOverrides::default() };
        let mut config = load(&given).expect("a configuration").config;
        config.output.path = Some(utf8(&output).into());
        config.sampler.progress_every = ltx2::config::ProgressEvery::Steps(1);
        let options = GenerateOptions { checkpoint_every: Some(1), resume, ..GenerateOptions::default() };
        let made = generate(&config, options, None, &mut Interrupt(at)).map_err(|error| error.to_string());
        made.map(|made| made[0].frames_sha256.clone())
    };
    server.answer(Answer::Text("A \u{201c}red\u{201d} fox."));
    assert!(run(false, Some(2)).expect_err("interrupted").starts_with("interrupted after"));
    server.answer(Answer::Text("A blue fox."));
    server.requests();
    assert_eq!(json!(run(true, None).expect("resumes")), sidecar["sha256"]["frames"]);
    assert!(server.requests().is_empty());
    assert_eq!(json_of(&at("steps.json"))["enhancement"]["prompts"], record["prompts"]);
}
