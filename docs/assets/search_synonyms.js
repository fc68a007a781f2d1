/* Adds to what is searched for the words that these pages have for it: who mixes datasets finds
 * "blend". */
"use strict";
(() => {
  const SAID = [
    [/\b(gradient|activation) (check-?pointing)\b|梯度检查点|激活检查点|重算/, "recompute"],
    [/\bmix(ing|ed|ture)?\b.*\bdata|\bdata\w*\b.*\bmix|\b(combine|interleave|merge)\w*\b.*\bdata|混合.*数据|数据.*混合/, "blend"],
    [/\b(multi-?node|two nodes|several nodes|machines|computers)\b|多机|多节点/, "hosts"],
    [/\b(restart|continue|pre-?empt|spot)\w*\b|续训|断点|被抢占/, "resume"],
    [/\b(resume|restart)\w*\b|续训|断点|恢复训练/, "checkpoint"],
    [/\bcrash(es|ed|ing)?\b|\bdies\b|崩溃|挂了/, "died"],
    [/\b(oom|out of memory)\b|爆显存|显存不足|显存不够/, "memory"],
    [/\bfine-?tun\w*\b|\bfinetun\w*\b|\bsft\b|微调/, "fine-tuning"],
    [/\b(val|validate|validation|eval|evaluate|test set)\b|验证集/, "evaluation validation"],
    [/\b(wandb|tensorboard|mlflow|tracker)\b|实验跟踪/, "loggers"],
    [/\b(determinis\w*|reproduc\w*|seeds?)\b|复现|随机种子|确定性/, "same numbers seed"],
    [/\b(mac|macbook|apple|mps|m[1-4])\b|苹果/, "macOS"],
    [/\b(rocm|radeon|mi[23]\d\d\w?)\b/, "AMD"],
    [/\bmfu\b|\bgpu utili[sz]ation\b|利用率/, "MFU"],
    [/\b(tokens?\/s|tokens per second|samples per second|speed)\b|吞吐|训练速度/, "throughput"],
    [/\b(lr|learning[- ]rate)\b|学习率/, "lr warmup"],
    [/\b(huggingface|hugging face|from_pretrained|transformers)\b/, "hf"],
    [/\bmoe\b|mixture of experts|混合专家/, "experts"],
    [/\bglobal batch\b|\bbatch[- ]size\b|批大小|批量大小|批次大小/, "batch accumulate"],
    [/\bjupyter\b|\bcolab\b|笔记本/, "notebook"],
    [/\bvs\.?\b|\bversus\b|\bcompared? (to|with)\b|区别|对比/, "difference"],
    [/\b(kill(ed)?|ctrl-?c|sigterm|sigkill)\b/, "stopped signal"],
    [/\b(stuck|freez\w*|hangs?|hanging|deadlock\w*)\b|卡住|卡死/, "hang"],
    [/\bvllm\b|\bllama\.?cpp\b|\bggu?f\b|\bollama\b|推理部署/, "export"],
    [/\b(un)?even(ly)? memory\b|\brank 0\b.*\bmemory\b/, "memory of a rank"],
  ];

  const QUERY = 2; // the kind of message that asks the search (mkdocs-material)
  window.Worker = class extends window.Worker {
    postMessage(message, ...rest) {
      if (message?.type === QUERY && !message.data.includes('"')) {
        const query = message.data.toLowerCase();
        const added = SAID.filter(([said]) => said.test(query)).map(([, words]) => words);
        const missing = [...new Set(added.join(" ").split(" "))].filter((word) => !query.includes(word));
        message = { ...message, data: [message.data, ...missing].join(" ").trim() };
      }
      super.postMessage(message, ...rest);
    }
  };
})();
