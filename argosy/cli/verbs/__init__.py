"""One thin file a verb, which imports a job only when the verb runs; and the table of them."""

# Verb -> the module whose `app` runs it, and its description.
VERBS = {
    "quickstart": ("argosy.cli.verbs.quickstart", "train, kill, resume, talk to, export and report on a small model, here"),
    "train": ("argosy.cli.verbs.train", "train by a recipe, or resume a run"),
    "launch": ("argosy.cli.verbs.launch", "run a command as several processes, and start them again when one ends"),
    "sweep": ("argosy.cli.verbs.sweep", "train with every combination of some settings, and compare"),
    "generate": ("argosy.cli.verbs.generate", "continue a prompt with a trained model"),
    "eval": ("argosy.cli.verbs.eval", "evaluate a model: perplexity, multiple choice, exact match, IFEval"),
    "serve": ("argosy.cli.verbs.serve", "serve a model over HTTP, with OpenAI's API"),
    "chat": ("argosy.cli.verbs.chat", "talk to a model or a server in the terminal"),
    "run-batch": ("argosy.cli.verbs.batch", "answer a file of OpenAI-style requests; killed, it resumes"),
    "bench": ("argosy.cli.verbs.bench", "measure the speed of a running server"),
    "convert": ("argosy.cli.verbs.convert", "convert between Hub folder, GGUF (in) and Argosy checkpoint"),
    "quantize": ("argosy.cli.verbs.quantize", "write a model in few bits"),
    "export": ("argosy.cli.verbs.export", "write a model as a bundle: programs, weights, manifest"),
    "bundle": ("argosy.cli.verbs.bundle", "show, verify, run, compare and renew bundles"),
    "predict": ("argosy.cli.verbs.predict", "serve bundles over HTTP: Open Inference Protocol, TensorFlow Serving's REST"),
    "data": ("argosy.cli.verbs.data", "tokenize a corpus, look at training rows, train a tokenizer"),
    "models": ("argosy.cli.verbs.models", "list model families and presets: sizes, memory, FLOPs"),
    "runs": ("argosy.cli.verbs.runs", "list, show and compare runs"),
    "report": ("argosy.cli.verbs.report", "write a run as one HTML page"),
    "doctor": ("argosy.cli.verbs.doctor", "check this machine: devices, versions, memory, disk"),
    "config": ("argosy.cli.verbs.config", "show, explain and compare settings; start a recipe"),
    "completion": ("argosy.cli.verbs.completion", "print the completion script of a shell"),
}
