# Sourced by the examples with stages that are supervised, or learn from pairs: these refuse keys that only RL reads.
supervised_words=() pair_words=()
for word in "$@"; do
  case "${word%%=*}" in
    algorithm* | rollout* | reward* | environment* | inference* | plan* | data.val_sets*) ;;
    dpo* | rm* | data.chosen_key | data.rejected_key | data.margin_key) ;;
    data.curriculum | data.mix.*.curriculum) ;;
    trainer.policy.optimizer.lr | trainer.policy.optimizer.scheduler | trainer.policy.optimizer.*_steps) ;;
    trainer.critic*) ;;
    trainer.*_batch_size | trainer.update_epochs | trainer.total_steps) ;;
    sft* | data.*_size) supervised_words+=("$word") ;;
    *) supervised_words+=("$word") pair_words+=("$word") ;;
  esac
done
